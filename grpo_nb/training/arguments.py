"""From our settings to the arguments of the installed TRL."""

from pathlib import Path
from typing import Any

from grpo_nb.config import RunConfig
from grpo_nb.models import cuda_available

# Settings of `train` that TRL knows by the same name.
TRL_NAMES = (
    *("max_steps", "learning_rate", "warmup_steps", "num_generations", "temperature", "beta"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length"),
    *("loss_type", "scale_rewards", "multi_objective_aggregation", "report_to"),
)


def grpo_arguments(config: RunConfig, output_dir: Path, vllm: bool) -> dict[str, Any]:
    """The arguments of trl.GRPOConfig that this run sets; all others are TRL's defaults."""
    automatic = "adamw_8bit" if cuda_available() else "adamw_torch"
    return {
        **{name: getattr(config.train, name) for name in TRL_NAMES},
        "output_dir": str(output_dir),
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not cuda_available(),
        "optim": automatic if config.policy.optim == "auto" else config.policy.optim,
        "gradient_checkpointing": cuda_available(),
        "use_vllm": vllm,
        "shuffle_dataset": config.data.order == "shuffled",
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "save_strategy": "no",  # the monitor says when
        "disable_tqdm": True,
        **config.trl,
    }
