"""From our settings to the arguments of the installed TRL, and what becomes of them there.

Nothing is taken on trust: `refuse_unknown_trl` reads the fields that the installed GRPOConfig
really has, and `effective` compares what was asked for with what the trainer holds. On a GPU
Unsloth replaces GRPOConfig by a class of its own that only warns of unknown arguments, has
other defaults (weight_decay 0.001, router_aux_loss_coef 0, vLLM's importance-sampling
correction off) and follows some papers: an explicit loss_type "dapo" masks truncated
completions and takes epsilon_high 0.28, "cispo" epsilon_high 5, and "dr_grpo" turns
scale_rewards "group" off. What is set by `trl.<name>=…` it leaves alone.
Source: unsloth/models/rl.py 2026.10.9.
"""

import ast
import builtins
import importlib.util
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import TypeAdapter, ValidationError

from grpo_nb.batch import solve_batch
from grpo_nb.config import RunConfig, source_of
from grpo_nb.models import cuda_available, has_bf16
from grpo_nb.profiles import refuse_unknown
from grpo_nb.runs import Run, Stage, atomic_path

if TYPE_CHECKING:
    from trl import GRPOConfig

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
# The same value in another form is no change.
REWRITTEN = {"accelerator_config", "debug", "report_to"}
# An argument that TRL fills from another where it is None.
NONE_MEANS = {"epsilon_high": "epsilon", "num_generations_eval": "num_generations"}


def grpo_arguments(
    config: RunConfig, output_dir: Path, vllm: bool, processes: int = 1
) -> dict[str, Any]:
    """The arguments of trl.GRPOConfig that this run sets; all others are TRL's defaults.

    Args:
        config: Its step is that of all processes together, and its pass that of one.
        output_dir: Of the stage.
        vllm: Whether Unsloth generates by vLLM.
        processes: That share the step.
    """
    group = config.train.num_generations
    rows = config.train.per_device_train_batch_size
    batch = solve_batch(config.step_completions // group, group, rows, processes)
    automatic = "adamw_8bit" if cuda_available() else "adamw_torch"
    trackers = [name.strip() for name in config.train.report_to.split(",")]
    refuse_missing_trackers(trackers)
    batching = "use_transformers_continuous_batching"
    if config.trl.get(batching) and config.policy.backend != "transformers":
        raise ValueError(
            f"trl.{batching} needs policy.backend = 'transformers': Unsloth's forward has no "
            "attention over its pages"
        )
    return {
        **{name: getattr(config.train, name) for name in TRL_NAMES},
        **batch._asdict(),
        "output_dir": str(output_dir),
        "report_to": trackers,
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not cuda_available(),
        "optim": automatic if config.policy.optim == "auto" else config.policy.optim,
        "gradient_checkpointing": cuda_available(),
        **({} if {"bf16", "fp16"} & set(config.trl) else precision()),
        "use_vllm": vllm,
        **vllm_by_trl(config),
        "shuffle_dataset": config.data.order == "shuffled",
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "save_strategy": "no",  # the monitor says when
        "disable_tqdm": True,
        **config.trl,
    }


def vllm_by_trl(config: RunConfig) -> dict[str, Any]:
    """With `trl.vllm_mode` TRL itself drives vLLM: on a server, or beside the policy.

    Raises:
        ValueError: The policy is Unsloth's, which drives its own, or in 4 bit.
    """
    if "vllm_mode" not in config.trl:
        return {}
    for name, value, needed in (
        ("policy.backend", config.policy.backend, "transformers"),
        ("model.quantization", config.model.quantization, "16bit"),
    ):
        if value != needed:
            raise ValueError(
                f"trl.vllm_mode = {config.trl['vllm_mode']!r} needs {name} = {needed!r}, and it is "
                f"{value!r}: set it, or leave trl.vllm_mode out"
            )
    return {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": config.policy.gpu_memory_utilization,
        "vllm_enable_sleep_mode": config.policy.standby,
        "vllm_max_model_length": config.model.max_seq_length,
    }


def refuse_missing_trackers(names: list[str]) -> None:
    """Raise RuntimeError that says what to install for a tracker that is not there."""
    missing = [n for n in names if n != "none" and importlib.util.find_spec(n) is None]
    if missing:
        raise RuntimeError(
            f"train.report_to = {', '.join(names)!r} needs a package that is missing: "
            f"pip install {' '.join(missing)}, or set it to 'none'"
        )


def precision() -> dict[str, bool]:
    """bf16 where that is computed in; else fp16 on a GPU, as Unsloth does, and fp32 on a CPU."""
    return {"bf16": has_bf16(), "fp16": cuda_available() and not has_bf16()}


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
        except ValidationError:
            raise ValueError(
                f"trl.{name} = {value!r} is of type {type(value).__name__}, and TRL wants "
                f"{known[name]}: write it as Python would"
            ) from None


def effective(args: "GRPOConfig", passed: Mapping[str, Any], stage: Stage) -> pd.DataFrame:
    """Every argument of TRL's as the training will use it, and who decided it.

    Args:
        args: The trainer's `args`, or a GRPOConfig(**passed).
        passed: What it was built from: `grpo_arguments`, and what was added.
        stage: Holds the settings and where they came from.

    Returns:
        argument, value, from ("set here", "config.yaml", "task …", "profile …", "grpo_nb" for
        our defaults and what we always set, "TRL's default"), changed ("" or who silently
        made another value of it: TRL, or Unsloth and the trainer after it).
    """
    own = [kind for kind in type(args).__mro__ if kind.__name__ == "GRPOConfig"][-1]
    alone = own(**passed)  # what TRL makes of it where nobody patches
    after = "the trainer" if type(args) is own else "Unsloth"
    rows = []
    for field in fields(own):
        default = field.default_factory() if field.default is MISSING else field.default
        steps = (passed.get(field.name, default), getattr(alone, field.name))
        value = getattr(args, field.name)
        rows.append(
            {
                "argument": field.name,
                "value": getattr(value, "value", value),  # an enum's
                "from": _source(field.name, passed, stage),
                "changed": _changed(field.name, *steps, value, after, args),
            }
        )
    return pd.DataFrame(rows)


def _source(name: str, passed: Mapping[str, Any], stage: Stage) -> str:
    if name not in passed:
        return "TRL's default"
    setting = f"trl.{name}" if name in stage.config.trl else SETTING_OF.get(name)
    source = source_of(stage.config, stage.set_here, setting) if setting else "default"
    return "grpo_nb" if source == "default" else source


def _changed(name: str, asked: Any, alone: Any, used: Any, after: str, args: "GRPOConfig") -> str:
    if name in REWRITTEN:
        return ""
    told = [f"TRL: {_text(asked)} → {_text(alone)}"] if alone != asked else []
    told += [f"{after}: {_text(alone)} → {_text(used)}"] if used != alone else []
    if used is None and name in NONE_MEANS:
        told.append(f"TRL reads {NONE_MEANS[name]}: {getattr(args, NONE_MEANS[name])}")
    return "; ".join(told)


def _text(value: Any) -> str:
    return str(getattr(value, "value", value))


def notable(table: pd.DataFrame) -> pd.DataFrame:
    """Of `effective`'s rows those that we set, or that somebody changed; without the folder."""
    seen = (table["from"] != "TRL's default") | (table["changed"] != "")
    return table[seen & (table["argument"] != "output_dir")]


def write_arguments(run: Run, table: pd.DataFrame) -> Path:
    """Write `effective`'s rows to train/arguments.csv, one line an argument."""
    path = run / "train/arguments.csv"
    with atomic_path(path) as temporary:
        table.to_csv(temporary, index=False)
    return path
