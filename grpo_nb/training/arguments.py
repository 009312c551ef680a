"""From our settings to the GRPOConfig of the installed TRL, and what becomes of them there.

`grpo_config` builds it, and `effective` shows each argument with who decided it: what was asked
for is compared with what the config holds. On a GPU Unsloth replaces GRPOConfig by a class of its
own that only warns of unknown arguments, has other defaults (weight_decay 0.001,
router_aux_loss_coef 0, vLLM's importance-sampling correction off) and follows some papers: an
explicit loss_type "dapo" masks truncated completions and takes epsilon_high 0.28, "cispo"
epsilon_high 5, and "dr_grpo" turns scale_rewards "group" off. What is set by `trl.<name>=…` it
leaves alone. Source: unsloth/models/rl.py 2026.10.9.
"""

import math
import typing
from dataclasses import Field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_nb import environments
from grpo_nb.models import Policy, cuda_available, has_bf16, use_vllm
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.runs import Stage
from grpo_nb.runs.config import RunConfig, flatten, resolve
from grpo_nb.runs.names import refuse_unknown
from grpo_nb.training import health, metrics, ranks
from grpo_nb.training.placebo import paid_weights

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
    "chat_template_kwargs": "model.chat_template_kwargs",
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
# Attributes of a GRPOConfig that are not arguments: transformers, or Unsloth's trainer, sets them.
NO_ARGUMENTS = (
    *("mixed_precision", "distributed_state", "fsdp_plugin_args", "xla_fsdp_config"),
    *("deepspeed_plugin", "hf_deepspeed_config", "max_seq_length"),
)
# The trainer sets the folder; transformers has made an object of the other.
UNCHECKED = ("output_dir", "accelerator_config")
# Decided by settings of ours alone; TRL does not get to see the arguments.
UNUSED = ("save_steps", "save_total_limit", "eval_steps", "resume_from_checkpoint")
# The same value in another form is no change.
REWRITTEN = {"accelerator_config", "debug", "report_to"}
# Arguments of sampling that the trainer's log-probabilities do not follow, with the values that
# leave the policy's distribution as it is (None and vLLM's -1 do, too).
NOT_FOLLOWED = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
# By which a value that is given for an argument of TRL's is judged.
STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)


class Batch(NamedTuple):
    """The two settings of `train` that say how a step's completions are cut."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int


def solve_batch(
    prompts_per_step: int, num_generations: int, max_rows_in_memory: int, processes: int = 1
) -> Batch:
    """The largest micro-batch that fits, so that all of them together make the step.

    TRL wants whole groups in a step: per-device batch x accumulation x processes has to be
    prompts x group. A group may be cut between micro-batches, for advantages are computed before.

    Args:
        prompts_per_step: Prompts that one optimizer step learns from, on all processes.
        num_generations: Completions per prompt: the group.
        max_rows_in_memory: Completions that one micro-batch may hold, on one process.
        processes: That share the step.

    Raises:
        ValueError: The processes cannot share the step evenly (the nearest number of prompts
            is given).

    >>> solve_batch(prompts_per_step=4, num_generations=8, max_rows_in_memory=12)
    Batch(per_device_train_batch_size=8, gradient_accumulation_steps=4)
    """
    completions = prompts_per_step * num_generations
    if completions % processes:
        step = processes // math.gcd(num_generations, processes)
        nearest = max(1, round(prompts_per_step / step)) * step
        raise ValueError(
            f"{prompts_per_step} prompts x {num_generations} completions = {completions} cannot be "
            f"shared by {processes} processes: take {nearest} prompts"
        )
    share = completions // processes
    rows = next(n for n in range(min(max_rows_in_memory, share), 0, -1) if share % n == 0)
    return Batch(rows, share // rows)


def grpo_config(stage: Stage, policy: Policy, rewards: RewardSet) -> "GRPOConfig":
    """The trl.GRPOConfig of this run; anything in it may be changed before the trainer is built.

    Raises:
        ValueError: TRL does not take one of the settings as it is.
    """
    from trl import GRPOConfig

    refuse_unknown_trl(stage.config)
    return GRPOConfig(**grpo_arguments(stage, policy, rewards))


def distorted(args: "GRPOConfig") -> str:
    """The arguments by which samples are not the policy's own, as "trl.top_p = 0.9"; or ""."""
    asked = vars(args) | (args.generation_kwargs or {})
    plain = NOT_FOLLOWED | {"temperature": args.temperature}
    named = [name for name in plain if asked[name] not in (plain[name], None, -1)]
    return " and ".join(f"trl.{name} = {asked[name]}" for name in named)


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
        _refuse_type(f"trl.{name}", value, known[name])


def _refuse_type(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError unless the value is of the type that TRL declares, and finite."""
    try:
        TypeAdapter(hint, config=STRICT).validate_python(value)
        for kind in typing.get_args(hint):  # a text may stand for one of an enum
            if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
                kind(value)
    except ValidationError as error:
        wrong = "; ".join(dict.fromkeys(one["msg"] for one in error.errors()))
        raise ValueError(f"{name} = {value!r}: {wrong}. Write it as Python would") from None
    except ValueError as error:  # of an enum: it lists what it takes
        raise ValueError(f"{name}: {error}") from None


def refuse_unusable(args: "GRPOConfig", stage: Stage, policy: Policy, rewards: RewardSet) -> None:
    """Raise ValueError if a cell set something in `args` that no training can use.

    Args:
        args: From `grpo_config`, or one of the caller's own.

    Raises:
        ValueError: An attribute is no argument (the nearest is named), has no effect here, has
            another type than TRL declares, is negative or not finite, is beyond the limits of
            our setting of that name, or does not fit the others.
    """
    names, hints = [field.name for field in fields(args)], typing.get_type_hints(own_config())
    for name in vars(args):
        if name in SETTING_OF and name not in names:
            raise ValueError(f"args.{name} has no effect: set {SETTING_OF[name]} instead")
        if name not in NO_ARGUMENTS and not name.startswith("_"):
            refuse_unknown("argument of GRPOConfig", f"args.{name}", [f"args.{n}" for n in names])
    passed, changed = grpo_arguments(stage, policy, rewards), {}
    for field in fields(own_config()):
        name, value, default = field.name, getattr(args, field.name), default_of(field)
        if name in UNCHECKED:
            continue
        _refuse_type(f"args.{name}", value, hints[name])
        if _plain(value) == _plain(passed.get(name, default)):
            continue
        if name in UNUSED:
            raise ValueError(f"args.{name} has no effect: set {SETTING_OF[name]} instead")
        if name in FIXED:
            raise ValueError(f"args.{name} = {value!r}: the stages need it as it was; leave it out")
        changed[name] = value
        if name in (*TRL_NAMES, "top_k") or type(default) not in (int, float) or default < 0:
            continue  # `_refuse_batch` has limits for the first
        least = 1 if default == 1 and isinstance(default, int) else 0  # of what is counted
        if value is not None and value < least:
            raise ValueError(f"args.{name} = {value!r}: take {least} or more")
    args._validate_args()
    _refuse_batch(args, stage.config, changed)


def _refuse_batch(args: "GRPOConfig", config: RunConfig, changed: dict[str, Any]) -> None:
    """Raise ValueError if changed arguments are beyond the settings' limits, or do not fit."""
    of_settings = set(TRL_NAMES) - REWRITTEN - (set(Batch._fields) if ranks.count() > 1 else set())
    settings = {f"train.{name}": changed[name] for name in of_settings & set(changed)}
    if settings:
        resolve(config.profile, flatten(config), settings)
    rows, group = args.per_device_train_batch_size * args.world_size, args.num_generations
    together, times = args.generation_batch_size, args.steps_per_generation
    if together != rows * times or together % group:
        raise ValueError(
            f"args.generation_batch_size = {together} has to be steps_per_generation {times} x "
            f"per_device_train_batch_size {rows} (of all processes), and a multiple of "
            f"num_generations {group}. Set train.num_generations and the others in the parameters "
            "cell: they are fitted to each other there"
        )


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
    gpu = cuda_available()
    acts = environments.of(config)
    automatic = "adamw_8bit" if gpu else "adamw_torch"
    bf16, trackers = has_bf16(), config.train.report_to.replace(" ", "").split(",")
    return {
        **{name: getattr(config.train, name) for name in TRL_NAMES},
        **batch._asdict(),
        "output_dir": str(folder),
        "report_to": trackers,
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not gpu,
        "optim": automatic if config.policy.optim == "auto" else config.policy.optim,
        "gradient_checkpointing": gpu,
        # Where bf16 is not computed in: fp16 on a GPU, as Unsloth does, and fp32 on a CPU.
        **({} if {"bf16", "fp16"} & set(config.trl) else {"bf16": bf16, "fp16": gpu and not bf16}),
        "use_vllm": policy.vllm,
        **vllm_by_trl(config),
        "shuffle_dataset": config.data.order == "shuffled",
        "reward_weights": paid_weights(rewards, config.train.control),
        "chat_template_kwargs": config.model.chat_template_kwargs or None,
        "router_aux_loss_coef": 0.0,  # as Unsloth's; routers are not trained
        "disable_dropout": True,  # else the loss is computed for another policy than has sampled
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "save_strategy": "no",  # `callbacks` say when
        "disable_tqdm": True,
        **({"max_tool_calling_iterations": acts.max_turns} if acts else {}),
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


def effective(args: "GRPOConfig", stage: Stage, policy: Policy, rewards: RewardSet) -> pd.DataFrame:
    """Every argument of TRL's as the training will use it, and who decided it.

    Args:
        args: From `grpo_config`, whatever has been changed in it since.

    Returns:
        argument, value, from ("set", "task …", "profile …", "grpo_nb" for
        our defaults and what we always set, "TRL's default"), changed ("", or what TRL, Unsloth
        or a cell made of the value that was asked for).
    """
    passed = grpo_arguments(stage, policy, rewards)
    rows = []
    for field in fields(own_config()):
        name, used = field.name, _plain(getattr(args, field.name))
        asked = _plain(passed.get(name, default_of(field)))
        source = stage.config.sources.get(setting_of(name), "default")
        source = "grpo_nb" if source == "default" else source
        changed = f"{asked} → {used}" if used != asked and name not in REWRITTEN else ""
        rows.append((name, used, source if name in passed else "TRL's default", changed))
    return pd.DataFrame(rows, columns=["argument", "value", "from", "changed"])


def default_of(field: Field) -> Any:
    """The default of an argument of TRL's; MISSING if it has none."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _plain(value: Any) -> Any:
    """What a reader writes for a value: an enum's own, or an array's list."""
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "value", value)


def notable(table: pd.DataFrame) -> pd.DataFrame:
    """Of `effective`'s rows those that we set, or that somebody changed; without the folder."""
    seen = (table["from"] != "TRL's default") | (table["changed"] != "")
    return table[seen & (table["argument"] != "output_dir")]


def expected(rewards: RewardSet, stage: Stage, validated: int) -> health.Expected:
    """What the run knows before step 1, by which its health is judged; `validated`: prompts."""
    weights = paid_weights(rewards, stage.config.train.control)
    ranges = {
        func.__name__: (weight, *declared_range(getattr(func, "reward", func)))
        for func, weight in zip(rewards.reward_funcs, weights, strict=True)
    }
    memory = metrics.memory_now()[1] / 2**30
    config = stage.config
    return health.Expected(
        ranges, config.step_completions, validated, config.train.max_steps, memory
    )
