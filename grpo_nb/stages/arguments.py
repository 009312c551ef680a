"""Turn our settings into TRL's GRPOConfig, and show where each argument's value comes from.

`grpo_arguments` returns the arguments of GRPOConfig; `effective` compares them with the config's
final values. On a GPU, Unsloth replaces GRPOConfig with its own class. That class only warns about
unknown arguments, has other defaults (weight_decay 0.001, router_aux_loss_coef 0, no importance
sampling correction for vLLM), and follows some papers: an explicit loss_type "dapo" masks truncated
completions and sets epsilon_high to 0.28, "cispo" sets epsilon_high to 5, and "dr_grpo" turns
scale_rewards "group" off. The class does not change what `grpo.<name>=…` sets. Source:
unsloth/models/rl.py 2026.10.9.
"""

import math
import typing
from collections.abc import Mapping
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any

import pandas as pd
from pydantic import ConfigDict, TypeAdapter, ValidationError

from grpo_nb import environments, ranks
from grpo_nb.models import Policy, cuda_available, has_bf16
from grpo_nb.models.hub import quiet
from grpo_nb.rewards import RewardSet
from grpo_nb.runs.config import ARGUMENTS
from grpo_nb.training.stock import solve_batch

if TYPE_CHECKING:
    from trl import GRPOConfig

    from grpo_nb.runs import Stage
    from grpo_nb.runs.settings import ModelConfig, RunConfig

STRICT = ConfigDict(arbitrary_types_allowed=True, allow_inf_nan=False, strict=True)


def own_config() -> type["GRPOConfig"]:
    """Return TRL's own GRPOConfig, even where Unsloth has replaced it."""
    import trl

    with quiet():  # bitsandbytes would ask for a package that nothing here needs
        kinds = trl.GRPOConfig.__mro__
    return [kind for kind in kinds if kind.__name__ == "GRPOConfig"][-1]


def refuse_arguments(extra: Mapping[str, Any]) -> None:
    """Refuse values of the wrong type for arguments of GRPOConfig.

    TRL, which takes seconds to import, is imported only if there are such arguments.

    Args:
        extra: The arguments for which there is no setting, as `config.grpo.model_extra` has them.

    Raises:
        ValueError: A value has the wrong type.
    """
    hints = typing.get_type_hints(own_config()) if extra else {}
    for name, value in extra.items():
        try:
            TypeAdapter(hints[name], config=STRICT).validate_python(value)
        except ValidationError as error:
            fault = error.errors()[0]["msg"]
            raise ValueError(f"grpo.{name} = {value!r}: {fault}. Give a Python literal") from None


def setting_of(argument: str) -> str:
    """Return the setting that determines one of TRL's arguments.

    >>> setting_of("learning_rate"), setting_of("seed")
    ('grpo.learning_rate', 'seed')
    """
    return ARGUMENTS["setting_of"].get(argument, f"grpo.{argument}")


def grpo_arguments(stage: "Stage", policy: Policy, rewards: RewardSet) -> dict[str, Any]:
    """Return the arguments of trl.GRPOConfig that this run sets; the others keep TRL's defaults.

    Completions per step are the total over all processes; the micro-batch size is per process.

    Raises:
        ValueError: A value has the wrong type.
    """
    config, grpo, gpu = stage.config, stage.config.grpo, cuda_available()
    extra, rows = grpo.model_extra, grpo.per_device_train_batch_size
    refuse_arguments(extra)
    prompts = rows * grpo.gradient_accumulation_steps // grpo.num_generations
    arguments = dict(grpo) | {
        **solve_batch(prompts, grpo.num_generations, rows, ranks.count())._asdict(),
        "output_dir": str(stage.run / "train"),
        "report_to": grpo.report_to.replace(" ", "").split(","),
        "seed": config.seed,
        "lr_scheduler_type": "constant_with_warmup",
        "use_cpu": not gpu,
        "gradient_checkpointing": gpu,
        "use_vllm": policy.vllm,
        "reward_weights": list(rewards.reward_weights),
        "chat_template_kwargs": grpo.chat_template_kwargs or None,
        "router_aux_loss_coef": 0.0,  # as in Unsloth; routers are not trained
        "disable_dropout": True,  # with dropout the loss would be another policy's
        "log_completions": True,
        "num_completions_to_print": 0,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    # A checkpoint keeps no completions, so it is written when those of a generation are used up.
    parts = arguments["gradient_accumulation_steps"]
    every = extra.get("steps_per_generation", parts) * extra.get("num_iterations", 1)
    every //= math.gcd(every, parts)
    arguments["save_steps"] = math.ceil(grpo.save_steps / every) * every
    if grpo.optim == "auto":
        arguments["optim"] = "adamw_8bit" if gpu else "adamw_torch"
    if not {"bf16", "fp16"} & set(extra):  # without bf16: fp16, or fp32 on a CPU
        arguments |= {"bf16": has_bf16(), "fp16": gpu and not has_bf16()}
    if config.data.environment:
        turns = environments.load(config.data.environment).max_turns
        arguments["max_tool_calling_iterations"] = turns
    return arguments | (_vllm_by_trl(config.model) if "vllm_mode" in extra else {}) | extra


def _vllm_by_trl(model: "ModelConfig") -> dict[str, Any]:
    """Return the arguments that let TRL itself run vLLM."""
    return {
        "use_vllm": True,
        "vllm_gpu_memory_utilization": model.gpu_memory_utilization,
        "vllm_enable_sleep_mode": model.unsloth_vllm_standby,
        "vllm_max_model_length": model.max_seq_length,
    }


def effective(
    args: "GRPOConfig", arguments: Mapping[str, Any], config: "RunConfig"
) -> pd.DataFrame:
    """Return the arguments of training that this run sets, or that differ from TRL's defaults.

    Args:
        args: The GRPOConfig.
        arguments: What `grpo_arguments` returned.
        config: The run's settings.

    Returns:
        A table with the columns `argument`, `value` and `from`. The last is "set", "task …",
        "profile …", "grpo_nb" for our defaults and fixed values, or "changed from" the earlier
        value if TRL, Unsloth or a cell changed it.
    """
    rows = []
    for field in [one for one in fields(own_config()) if one.name not in ARGUMENTS["not_shown"]]:
        name, value = field.name, _plain(getattr(args, field.name))
        before = _plain(arguments.get(name, default_of(field)))
        source = config.sources.get(setting_of(name), "default")
        source = "grpo_nb" if source == "default" else source
        if name in arguments or value != before:
            rows.append((name, value, source if value == before else f"changed from {before}"))
    return pd.DataFrame(rows, columns=["argument", "value", "from"])


def default_of(field: Field) -> Any:
    """Return the default of one of TRL's arguments; MISSING if it has none."""
    return field.default_factory() if callable(field.default_factory) else field.default


def _plain(value: Any) -> Any:
    """Convert an enum's member to its value, and an array to a list; return others unchanged."""
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "value", value)
