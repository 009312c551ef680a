"""From our settings to the GRPOConfig of the installed TRL, and what becomes of them there.

`grpo_config` builds it, and `effective` shows each argument with who decided it: what was asked
for is compared with what the config holds. On a GPU Unsloth replaces GRPOConfig by a class of its
own that only warns of unknown arguments, has other defaults (weight_decay 0.001,
router_aux_loss_coef 0, vLLM's importance-sampling correction off) and follows some papers: an
explicit loss_type "dapo" masks truncated completions and takes epsilon_high 0.28, "cispo"
epsilon_high 5, and "dr_grpo" turns scale_rewards "group" off. What is set by `trl.<name>=…` it
leaves alone. Source: unsloth/models/rl.py 2026.10.9.
"""

import importlib.util
import math
import typing
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_nb.models import Policy, cuda_available, has_bf16, use_vllm
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.runs import Stage
from grpo_nb.runs.config import RunConfig
from grpo_nb.runs.files import read_json
from grpo_nb.runs.names import refuse_unknown
from grpo_nb.training import health, ranks
from grpo_nb.training.batch import solve_batch

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
FIXED = (
    *("output_dir", "log_completions", "logging_steps", "save_strategy", "eval_strategy"),
    *("remove_unused_columns", "use_cpu", "use_transformers_continuous_batching"),
    *("logging_strategy", "save_only_model", "ignore_data_skip"),
)
# The same value in another form is no change.
REWRITTEN = {"accelerator_config", "debug", "report_to"}
# An argument that TRL fills from another where it is None.
TRACKERS = ("none", "tensorboard", "trackio", "wandb", "mlflow", "swanlab")
NONE_MEANS = {"epsilon_high": "epsilon", "num_generations_eval": "num_generations"}
ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def grpo_config(stage: Stage, policy: Policy, rewards: RewardSet) -> "GRPOConfig":
    """The trl.GRPOConfig of this run; anything in it may be changed before the trainer is built.

    Raises:
        ValueError: TRL does not take one of the settings as it is.
    """
    from trl import GRPOConfig

    refuse_unknown_trl(stage.config)
    return GRPOConfig(**grpo_arguments(stage, policy, rewards))


def own_config() -> type["GRPOConfig"]:
    """TRL's own class, which Unsloth's takes the place of."""
    import trl

    return [kind for kind in trl.GRPOConfig.__mro__ if kind.__name__ == "GRPOConfig"][-1]


def refuse_unknown_trl(config: RunConfig) -> None:
    """Raise ValueError unless TRL takes each `trl.<name>` as it is. Imports trl if there is one.

    Raises:
        ValueError: An argument that GRPOConfig does not have (the nearest name is given), that
            is a setting of ours or has to stay as it is, or whose value has another type.
    """
    known = typing.get_type_hints(own_config()) if config.trl else {}
    for name, value in config.trl.items():
        if name in SETTING_OF:
            raise ValueError(f"trl.{name} is decided by {SETTING_OF[name]}: set that instead")
        if name in FIXED:
            raise ValueError(f"trl.{name} cannot be set: the stages need it as it is; leave it out")
        refuse_unknown("argument of GRPOConfig", f"trl.{name}", list(map(setting_of, known)))
        try:
            TypeAdapter(known[name], config=ANY_CLASS).validate_python(value, strict=True)
        except ValidationError:
            wanted = getattr(known[name], "__name__", known[name])
            raise ValueError(
                f"trl.{name} = {value!r} is of type {type(value).__name__}, and TRL wants "
                f"{wanted}: write it as Python would"
            ) from None
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"trl.{name} = {value}: write a finite number, or leave it out")


def setting_of(argument: str) -> str:
    """The name of our setting that decides an argument of TRL's.

    >>> setting_of("learning_rate"), setting_of("top_p")
    ('train.learning_rate', 'trl.top_p')
    """
    return SETTING_OF.get(argument, f"trl.{argument}")


def grpo_arguments(stage: Stage, policy: Policy, rewards: RewardSet) -> dict[str, Any]:
    """The arguments of trl.GRPOConfig that this run sets; all others are TRL's defaults.

    The run's step is that of all processes together, and its micro-batch that of one.
    """
    config, folder = stage.config, stage.run / "train"
    group = config.train.num_generations
    rows = config.train.per_device_train_batch_size
    batch = solve_batch(config.step_completions // group, group, rows, ranks.count())
    automatic = "adamw_8bit" if cuda_available() else "adamw_torch"
    trackers = [name.strip() or "none" for name in config.train.report_to.split(",")]
    refuse_missing_trackers(trackers)
    return {
        **{name: getattr(config.train, name) for name in TRL_NAMES},
        **batch._asdict(),
        "output_dir": str(folder),
        "report_to": trackers,
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not cuda_available(),
        "optim": automatic if config.policy.optim == "auto" else config.policy.optim,
        "gradient_checkpointing": cuda_available(),
        **({} if {"bf16", "fp16"} & set(config.trl) else precision()),
        "use_vllm": policy.vllm,
        **vllm_by_trl(config),
        "shuffle_dataset": config.data.order == "shuffled",
        "reward_weights": list(rewards.reward_weights),
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "save_strategy": "no",  # `callbacks` say when
        "disable_tqdm": True,
        **config.trl,
    }


def vllm_by_trl(config: RunConfig) -> dict[str, Any]:
    """With `trl.vllm_mode` TRL itself drives vLLM: on a server, or beside the policy."""
    asked = "vllm" if "vllm_mode" in config.trl else "off"
    if not use_vllm(asked, config.model.quantization, "TRL", config.policy):
        return {}
    return {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": config.policy.gpu_memory_utilization,
        "vllm_enable_sleep_mode": config.policy.standby,
        "vllm_max_model_length": config.model.max_seq_length,
    }


def refuse_missing_trackers(names: list[str]) -> None:
    """Raise ValueError for an unknown tracker, RuntimeError for one that is not installed."""
    for name in names:
        refuse_unknown("tracker", name, list(TRACKERS))
    missing = [n for n in names if n != "none" and importlib.util.find_spec(n) is None]
    if missing:
        raise RuntimeError(
            f"train.report_to = {', '.join(names)!r} needs a package that is missing: "
            f"pip install {' '.join(missing)}, or set it to 'none'"
        )


def precision() -> dict[str, bool]:
    """bf16 where that is computed in; else fp16 on a GPU, as Unsloth does, and fp32 on a CPU."""
    return {"bf16": has_bf16(), "fp16": cuda_available() and not has_bf16()}


def effective(args: "GRPOConfig", stage: Stage, policy: Policy, rewards: RewardSet) -> pd.DataFrame:
    """Every argument of TRL's as the training will use it, and who decided it.

    Args:
        args: From `grpo_config`, whatever has been changed in it since.

    Returns:
        argument, value, from ("set here", "config.yaml", "task …", "profile …", "grpo_nb" for
        our defaults and what we always set, "TRL's default"), changed ("", or what TRL, Unsloth
        or a cell made of the value that was asked for).
    """
    passed = grpo_arguments(stage, policy, rewards)
    sources, rows = stage.config.sources, []
    for field in fields(own_config()):
        value = getattr(args, field.name)
        source = sources.get(setting_of(field.name), "default")
        row = {
            "argument": field.name,
            "value": _plain(value),
            "from": "grpo_nb" if source == "default" else source,
            "changed": _changed(
                field.name, _plain(passed.get(field.name, default_of(field))), args
            ),
        }
        rows.append(row if field.name in passed else row | {"from": "TRL's default"})
    return pd.DataFrame(rows)


def default_of(field: Field) -> Any:
    """The default of an argument of TRL's; MISSING if it has none."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _changed(name: str, asked: Any, args: "GRPOConfig") -> str:
    used = _plain(getattr(args, name))
    told = [f"{asked} → {used}"] if used != asked and name not in REWRITTEN else []
    if used is None and name in NONE_MEANS:
        told.append(f"TRL reads {NONE_MEANS[name]}: {getattr(args, NONE_MEANS[name])}")
    return "; ".join(told)


def _plain(value: Any) -> Any:
    """What a reader writes for a value: an enum's own."""
    return getattr(value, "value", value)


def notable(table: pd.DataFrame) -> pd.DataFrame:
    """Of `effective`'s rows those that we set, or that somebody changed; without the folder."""
    seen = (table["from"] != "TRL's default") | (table["changed"] != "")
    return table[seen & (table["argument"] != "output_dir")]


def expected(rewards: RewardSet, stage: Stage) -> health.Expected:
    """What the run knows before step 1, by which its health is judged."""
    report = stage.run / "rewards/report.json"
    baseline = read_json(report)["baseline"] if report.exists() else {}
    ranges = {
        func.__name__: (weight, *declared_range(getattr(func, "reward", func)))
        for func, weight in zip(rewards.reward_funcs, rewards.reward_weights, strict=True)
    }
    seconds = baseline.get("predicted seconds per step", math.inf)
    train = stage.config.train
    return health.Expected(ranges, stage.config.step_completions, train.eval_prompts, seconds)
