"""From our settings to the arguments of the installed TRL, and what becomes of them there.

Nothing is taken on trust: `effective` compares what was asked for with what the trainer holds,
and `grpo_nb.runs.trl_arguments` refuses what the installed GRPOConfig does not have. On a GPU
Unsloth replaces GRPOConfig by a class of its own that only warns of unknown arguments, has
other defaults (weight_decay 0.001, router_aux_loss_coef 0, vLLM's importance-sampling
correction off) and follows some papers: an explicit loss_type "dapo" masks truncated
completions and takes epsilon_high 0.28, "cispo" epsilon_high 5, and "dr_grpo" turns
scale_rewards "group" off. What is set by `trl.<name>=…` it leaves alone.
Source: unsloth/models/rl.py 2026.10.9.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb.models import cuda_available, has_bf16
from grpo_nb.runs import Run, Stage, atomic_path
from grpo_nb.runs.batch import solve_batch
from grpo_nb.runs.config import RunConfig, source_of
from grpo_nb.runs.trl_arguments import SETTING_OF, TRL_NAMES

if TYPE_CHECKING:
    from trl import GRPOConfig

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


def alone(passed: Mapping[str, Any]) -> "GRPOConfig":
    """What TRL by itself, which nobody patched, makes of its arguments.

    Before the trainer is built: any such config resets accelerate's state, which trainers use.
    """
    import trl

    own = [kind for kind in trl.GRPOConfig.__mro__ if kind.__name__ == "GRPOConfig"][-1]
    return own(**passed)


def effective(
    args: "GRPOConfig", untouched: "GRPOConfig", passed: Mapping[str, Any], stage: Stage
) -> pd.DataFrame:
    """Every argument of TRL's as the training will use it, and who decided it.

    Args:
        args: The trainer's `args`, or a GRPOConfig(**passed).
        untouched: What `alone` makes of `passed`.
        passed: What it was built from: `grpo_arguments`, and what was added.
        stage: Holds the settings and where they came from.

    Returns:
        argument, value, from ("set here", "config.yaml", "task …", "profile …", "grpo_nb" for
        our defaults and what we always set, "TRL's default"), changed ("" or who silently
        made another value of it: TRL, or Unsloth and the trainer after it).
    """
    after = "the trainer" if type(args) is type(untouched) else "Unsloth"
    rows = []
    for field in fields(untouched):
        default = field.default_factory() if field.default is MISSING else field.default
        steps = (passed.get(field.name, default), getattr(untouched, field.name))
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
