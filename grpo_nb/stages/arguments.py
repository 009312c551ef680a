"""Turn our settings into TRL's GRPOConfig, and show where each argument's value comes from.

`grpo_arguments` returns its arguments; `effective` compares them with the config's final values. On
a GPU, Unsloth replaces GRPOConfig with its own class. That class only warns about unknown
arguments, has other defaults (weight_decay 0.001, router_aux_loss_coef 0, no importance sampling
correction for vLLM), and follows some papers: an explicit loss_type "dapo" masks truncated
completions and sets epsilon_high to 0.28, "cispo" sets epsilon_high to 5, and "dr_grpo" turns
scale_rewards "group" off. The class does not change what `grpo.<name>=…` sets. Source:
unsloth/models/rl.py 2026.10.9.
"""

import typing
from dataclasses import MISSING, Field, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_nb import environments, ranks
from grpo_nb.files import read_yaml
from grpo_nb.models import Policy, cuda_available, has_bf16
from grpo_nb.names import refuse_elsewhere
from grpo_nb.rewards import RewardSet
from grpo_nb.runs.config import GrpoConfig, RunConfig, flatten, resolve
from grpo_nb.training.placebo import paid_weights
from grpo_nb.training.stock import Batch, solve_batch

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_nb.runs import Stage

ARGUMENTS = read_yaml(Path(__file__).with_name("arguments.yaml"))
TRL_NAMES = list(GrpoConfig.model_fields)
SETTING_OF = ARGUMENTS["setting_of"]
STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)


def own_config() -> type["GRPOConfig"]:
    """Return TRL's own GRPOConfig, even where Unsloth has replaced it."""
    import trl

    return [kind for kind in trl.GRPOConfig.__mro__ if kind.__name__ == "GRPOConfig"][-1]


def refuse_unknown_trl(config: RunConfig) -> None:
    """Refuse a `grpo.<name>` that TRL does not accept. Import trl only if there is one.

    Raises:
        ValueError: GRPOConfig has no such argument (the message names the nearest), it has no
            effect here, one of our settings determines it, other stages rely on it, its value has
            the wrong type, or it is fp16 on a CPU.
    """
    others = config.grpo.model_extra
    hints = typing.get_type_hints(own_config()) if others else {}
    for name, value in others.items():
        if name in SETTING_OF:
            raise ValueError(f"grpo.{name} is decided by {SETTING_OF[name]}: set that instead")
        if name in ARGUMENTS["fixed"]:
            raise ValueError(f"grpo.{name} cannot be set: other stages rely on it; leave it out")
        refuse_elsewhere(f"grpo.{name}")
        _refuse_type(f"grpo.{name}", value, hints[name])
    if others.get("fp16") and not cuda_available():  # it has no loss scale
        raise ValueError(
            "grpo.fp16 = True: fp16 needs a GPU, and a CPU trains in bf16 or fp32. Leave it out"
        )


def _refuse_type(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that is not finite, or not of the type that TRL declares."""
    try:
        TypeAdapter(hint, config=STRICT).validate_python(value)
        for kind in typing.get_args(hint):  # a string may name a member of an enum
            if isinstance(kind, type) and issubclass(kind, Enum) and isinstance(value, str):
                TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        faults = "; ".join(dict.fromkeys(fault["msg"] for fault in error.errors()))
        raise ValueError(f"{name} = {value!r}: {faults}. Give a Python literal") from None


def refuse_unusable(args: "GRPOConfig", stage: "Stage", policy: Policy, rewards: RewardSet) -> None:
    """Refuse arguments from a notebook's cell that a run could not have as settings either.

    Args:
        args: The GRPOConfig.
        stage: Stage 03.
        policy: The policy.
        rewards: The run's rewards.

    Raises:
        ValueError: An attribute is not an argument (the message names the nearest), has no effect,
            does not have the type that TRL declares, is beyond the limits of our setting of that
            name, or conflicts with the others.
    """
    defaults = {field.name: default_of(field) for field in fields(args)}
    of_trl = {field.name for field in fields(own_config())}
    values = defaults | grpo_arguments(stage, policy, rewards)
    others = {*ARGUMENTS["no_arguments"], *ARGUMENTS["unchecked"], *ARGUMENTS["rewritten"]}
    others |= defaults.keys() - of_trl  # Unsloth's
    changes = {
        name: value
        for name, value in vars(args).items()
        if not name.startswith("_") and name not in others
        if _plain(value) != _plain(values.get(name, MISSING))
    }
    for name in changes.keys() & set(ARGUMENTS["unused"]):
        raise ValueError(f"args.{name} has no effect: set {setting_of(name)} instead")
    exceptions = {*SETTING_OF, "optim", "chat_template_kwargs"}  # any value of TRL's
    exceptions |= {*Batch._fields} if ranks.count() > 1 else set()
    config = stage.config
    settings = {f"grpo.{name}": changes[name] for name in changes.keys() - exceptions}
    refuse_unknown_trl(resolve(config.profile, flatten(config), settings))
    args._validate_args()
    _refuse_batch(args)


def _refuse_batch(args: "GRPOConfig") -> None:
    """Refuse sizes of which TRL has computed some before a cell changed the others."""
    rows, group = args.per_device_train_batch_size * args.world_size, args.num_generations
    size, times = args.generation_batch_size, args.steps_per_generation
    if size != rows * times or size % group:
        raise ValueError(
            f"args.generation_batch_size = {size} must be steps_per_generation {times} x "
            f"per_device_train_batch_size {rows} (all processes) = {rows * times}, and a multiple "
            f"of num_generations {group}. Set grpo.num_generations and the others in the "
            "parameters cell, where they are made to fit"
        )


def setting_of(argument: str) -> str:
    """Return the setting that determines one of TRL's arguments.

    >>> setting_of("learning_rate"), setting_of("top_p")
    ('grpo.learning_rate', 'grpo.top_p')
    """
    return SETTING_OF.get(argument, f"grpo.{argument}")


def grpo_arguments(stage: "Stage", policy: Policy, rewards: RewardSet) -> dict[str, Any]:
    """Return the arguments of trl.GRPOConfig that this run sets; the others keep TRL's defaults.

    Completions per step are the total over all processes; the micro-batch size is per process.

    Raises:
        ValueError: TRL does not accept one of the settings.
    """
    refuse_unknown_trl(stage.config)
    config, grpo, gpu = stage.config, stage.config.grpo, cuda_available()
    prompts = config.step_completions // grpo.num_generations
    rows = grpo.per_device_train_batch_size
    arguments = {name: value for name, value in grpo if name not in ARGUMENTS["unused"]}
    arguments |= solve_batch(prompts, grpo.num_generations, rows, ranks.count())._asdict()
    arguments |= {
        "output_dir": str(stage.run / "train"),
        "report_to": grpo.report_to.replace(" ", "").split(","),
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,
        "use_vllm": policy.vllm,
        "reward_weights": paid_weights(rewards, config.train.placebo),
        "chat_template_kwargs": grpo.chat_template_kwargs or None,
        "router_aux_loss_coef": 0.0,  # as in Unsloth; routers are not trained
        "disable_dropout": True,  # with dropout the loss would be another policy's
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "save_strategy": "no",  # `callbacks` decides
        "disable_tqdm": True,
    }
    if grpo.optim == "auto":
        arguments["optim"] = "adamw_8bit" if gpu else "adamw_torch"
    if not {"bf16", "fp16"} & set(grpo.model_extra):  # without bf16: fp16, or fp32 on a CPU
        arguments |= {"bf16": has_bf16(), "fp16": gpu and not has_bf16()}
    if environment := environments.of(config):
        arguments["max_tool_calling_iterations"] = environment.max_turns
    return arguments | _vllm_by_trl(config) | grpo.model_extra


def _vllm_by_trl(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that let TRL itself run vLLM; {} unless `grpo.vllm_mode` is set."""
    if "vllm_mode" not in config.grpo.model_extra:
        return {}
    return {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": config.model.gpu_memory_utilization,
        "vllm_enable_sleep_mode": config.model.unsloth_vllm_standby,
        "vllm_max_model_length": config.model.max_seq_length,
    }


def effective(
    args: "GRPOConfig", stage: "Stage", policy: Policy, rewards: RewardSet
) -> pd.DataFrame:
    """Return the value of each GRPOConfig argument in training, and the source of the value.

    Args:
        args: The GRPOConfig, with later changes to it.
        stage: Stage 03.
        policy: The policy.
        rewards: The run's rewards.

    Returns:
        The columns argument, value, from ("set", "task …", "profile …", "grpo_nb" for our defaults
        and fixed values, "TRL's default"), and changed ("", or "before → after" if TRL, Unsloth or
        a cell changed our value).

    Raises:
        ValueError: As `refuse_unusable`.
    """
    refuse_unusable(args, stage, policy, rewards)
    ours = grpo_arguments(stage, policy, rewards)
    rows = []
    for field in fields(own_config()):
        name, value = field.name, _plain(getattr(args, field.name))
        before = _plain(ours.get(name, default_of(field)))
        source = stage.config.sources.get(setting_of(name), "default")
        source = "grpo_nb" if source == "default" else source
        differs = value != before and name not in ARGUMENTS["rewritten"]
        change = f"{before} → {value}" if differs else ""
        rows.append((name, value, source if name in ours else "TRL's default", change))
    return pd.DataFrame(rows, columns=["argument", "value", "from", "changed"])


def default_of(field: Field) -> Any:
    """Return the default of one of TRL's arguments; MISSING if it has none."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _plain(value: Any) -> Any:
    """Convert an enum's member to its value, and an array to a list; return others unchanged."""
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "value", value)


def notable(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `effective` whose value was set or changed, without the output folder."""
    ours = (table["from"] != "TRL's default") | (table["changed"] != "")
    return table[ours & (table["argument"] != "output_dir")]
