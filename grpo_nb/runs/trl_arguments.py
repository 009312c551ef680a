"""Which arguments of TRL's `trl.<name>` may be set: those that the installed GRPOConfig has."""

import ast
import builtins
import importlib.util
import math
import typing
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from grpo_nb.runs.config import RunConfig
from grpo_nb.runs.names import refuse_unknown

# Settings of `train` that TRL knows by the same name.
TRL_NAMES = (
    *("max_steps", "learning_rate", "warmup_steps", "num_generations", "temperature", "beta"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_completion_length"),
    *("loss_type", "scale_rewards", "multi_objective_aggregation", "report_to"),
)
# Every argument of TRL's that a setting of ours decides.
SETTING_OF = {
    **{name: f"train.{name}" for name in TRL_NAMES},
    **{"seed": "seed", "optim": "policy.optim", "use_vllm": "model.fast_inference"},
    **{"shuffle_dataset": "data.order", "reward_weights": "rewards.reward_weights"},
    **{"save_steps": "train.save_steps", "save_total_limit": "train.keep_checkpoints"},
    **{"eval_steps": "train.eval_steps", "resume_from_checkpoint": "train.resume"},
    "vllm_gpu_memory_utilization": "policy.gpu_memory_utilization",
    "vllm_enable_sleep_mode": "policy.standby",
    # No longer TRL's, and still in many examples.
    **{"max_prompt_length": "data.max_prompt_tokens", "warmup_ratio": "train.warmup_steps"},
}
# What the stages' hand-off rests on.
FIXED = ("output_dir", "log_completions", "logging_steps", "save_strategy", "eval_strategy")
FIXED = (*FIXED, "remove_unused_columns", "use_cpu")


@cache
def trl_fields() -> dict[str, str]:
    """{argument: its type as text} of the installed trl.GRPOConfig, read from its source.

    Importing trl takes seconds, and done before Unsloth's import it keeps Unsloth's patches out.
    """
    found: dict[str, str] = {}
    for package, file, name in (
        ("transformers", "training_args.py", "TrainingArguments"),
        ("trl", "trainer/base_config.py", "_BaseConfig"),
        ("trl", "trainer/grpo_config.py", "GRPOConfig"),
    ):
        source = Path(importlib.util.find_spec(package).origin).parent / file
        classes = ast.parse(source.read_text(encoding="utf-8")).body
        body = next(n.body for n in classes if isinstance(n, ast.ClassDef) and n.name == name)
        lines = [node for node in body if isinstance(node, ast.AnnAssign)]
        found |= {line.target.id: ast.unparse(line.annotation) for line in lines}
    return found


class _Types(dict):
    """Names in an annotation; a class of TRL's or transformers' own stands for any value."""

    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, getattr(typing, name, Any))


def refuse_unknown_trl(config: RunConfig) -> None:
    """Raise ValueError unless TRL takes each `trl.<name>` as it is; needs no torch.

    Raises:
        ValueError: An argument that GRPOConfig does not have (the nearest name is given), that
            is a setting of ours or has to stay as it is, or whose value has another type.
    """
    known = trl_fields() if config.trl else {}
    for name, value in config.trl.items():
        if name in SETTING_OF:
            raise ValueError(f"trl.{name} is decided by {SETTING_OF[name]}: set that instead")
        if name in FIXED:
            raise ValueError(f"trl.{name} cannot be set: the stages need it as it is; leave it out")
        names = [SETTING_OF.get(argument, f"trl.{argument}") for argument in known]
        refuse_unknown("argument of GRPOConfig", f"trl.{name}", names)
        try:
            wanted = eval(known[name], {}, _Types())
            TypeAdapter(wanted).validate_python(value, strict=True)
            finite = not isinstance(value, float) or math.isfinite(value)
        except ValidationError:
            raise ValueError(
                f"trl.{name} = {value!r} is of type {type(value).__name__}, and TRL wants "
                f"{known[name]}: write it as Python would"
            ) from None
        if not finite:
            raise ValueError(f"trl.{name} = {value}: write a finite number, or leave it out")
