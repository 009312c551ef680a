"""TRL's GRPOTrainer over the policy."""

import math
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from grpo_nb.config import RunConfig
from grpo_nb.models import Policy
from grpo_nb.rewards import RewardSet, keep_adaptive_weights
from grpo_nb.runs import Run, atomic_path
from grpo_nb.training.arguments import grpo_arguments

if TYPE_CHECKING:
    from trl import GRPOTrainer


def build_trainer(
    policy: Policy, preset: RewardSet, rows: Sequence[dict], config: RunConfig, run: Run
) -> "GRPOTrainer":
    """A GRPOTrainer that writes metrics.jsonl and completions/ below the run's train/."""
    import torch
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    # An earlier training in this run may have been longer.
    (run / "train/metrics.jsonl").unlink(missing_ok=True)
    shutil.rmtree(run / "train/completions", ignore_errors=True)
    arguments = grpo_arguments(config, run / "train", policy.vllm)
    arguments["reward_weights"] = list(preset.reward_weights)
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=list(preset.reward_funcs),
        args=GRPOConfig(**arguments),
        # Rows may hold dicts and lists of any type, which Arrow would merge or refuse.
        train_dataset=Dataset.from_list([dict(row) for row in rows], on_mixed_types="use_json"),
        callbacks=[keep_adaptive_weights(preset.reward_funcs)],
    )
    for parameter in policy.model.parameters():
        if parameter.requires_grad:  # TRL casts a 4-bit model's adapter to bf16
            parameter.data = parameter.data.to(torch.float32)
    return trainer


def save_adapter(trainer: "GRPOTrainer", policy: Policy, run: Run) -> None:
    """Write train/adapter/: the trained adapter and the tokenizer, nothing else."""
    with atomic_path(run / "train/adapter") as temporary:
        trainer.model.save_pretrained(temporary, selected_adapters=["default"])
        policy.tokenizer.save_pretrained(temporary)


def adapter_norm(policy: Policy) -> float:
    """Norm of LoRA's B matrices: 0 before the first step, for LoRA begins as the base."""
    weights = (p for name, p in policy.model.named_parameters() if "lora_B" in name)
    return math.sqrt(sum(float(weight.detach().float().square().sum()) for weight in weights))
