"""Fine-tune on right answers before GRPO, so that the model solves some prompts at all.

The answers are those of data/sft.parquet, with their steps if the source has them.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from grpo_nb import data, models, ranks
from grpo_nb.files import atomic_path, read_json, write_json
from grpo_nb.models import Policy
from grpo_nb.reward_lab.baseline import WARMED
from grpo_nb.reward_lab.table import Row
from grpo_nb.rewards import load_rewards
from grpo_nb.rewards.prompts import json_key
from grpo_nb.stages import checkpoints

if TYPE_CHECKING:
    from grpo_nb.runs import Stage
    from grpo_nb.runs.config import RunConfig


def warm_up_base(stage: "Stage") -> str:
    """Do the SFT warm-up first, so that the baseline measures the policy that GRPO starts from.

    Returns:
        A sentence that describes the warm-up.
    """
    config, about = stage.config, _saved(stage)
    if about or not config.train.sft_steps:
        return _sentence(about)
    model = config.model.model_copy(update={"fast_inference": "off"})  # vLLM is not needed here
    with closing(models.load_policy(config.model_copy(update={"model": model}))) as policy:
        return warm_up(policy, stage)


def warm_up(policy: Policy, stage: "Stage") -> str:
    """Do the SFT warm-up with a loaded policy; do nothing if `train.sft_steps` is 0.

    The warm-up runs once. Its weights are saved in rewards/warm_up/, and loaded from there later.

    Returns:
        A sentence that describes the warm-up.
    """
    about = ranks.from_main(lambda: _saved(stage))
    if about:
        models.load_weights(policy, stage.run / WARMED)
    elif stage.config.train.sft_steps:
        about = _train_and_save(policy, stage)
    return _sentence(about)


def _train_and_save(policy: Policy, stage: "Stage") -> dict[str, Any]:
    """Train the policy on right answers, save its weights, and return the content of about.json."""
    from grpo_nb.stages.sft import train_on  # Unsloth has to be imported before TRL

    rows = data.load(stage.run, "sft")
    lines = train_on(policy, stage, data.worked_rows(rows, load_rewards(stage.config.rewards)))
    about = {"of": _identity(stage.config, rows), "lines": lines}

    def save() -> None:
        with atomic_path(stage.run / WARMED) as temporary:
            checkpoints.save_trained(policy.model, temporary)
            policy.tokenizer.save_pretrained(temporary)
            write_json(temporary / "about.json", about)

    ranks.from_main(save)
    return about


def _saved(stage: "Stage") -> dict[str, Any]:
    """Return about.json of the saved warm-up; {} if there is none for these settings."""
    path = stage.run / WARMED / "about.json"
    if stage.config.train.sft_steps and path.is_file():
        about = read_json(path)
        if about["of"] == _identity(stage.config, data.load(stage.run, "sft")):
            return about
    return {}


def _identity(config: "RunConfig", rows: Sequence[Row]) -> dict[str, Any]:
    """Return everything on which the weights after the warm-up depend."""
    settings = {name: value for name, value in config.train if name.startswith("sft_")}
    text = json.dumps([rows, load_rewards(config.rewards).form.name], default=json_key)
    settings |= {"seed": config.seed, "rows": hashlib.sha256(text.encode()).hexdigest()}
    exclude = {"fast_inference", "gpu_memory_utilization", "unsloth_vllm_standby"}
    model = config.model.model_dump(exclude=exclude) | config.lora.model_dump()
    template = config.grpo.chat_template_kwargs
    return settings | {"model": model, "template": template, "adapter": config.policy.adapter}


def _sentence(about: dict[str, Any]) -> str:
    if not about:
        return "no SFT warm-up (train.sft_steps = 0)"
    first, last = about["lines"][0], about["lines"][-1]
    return f"{last['step']} SFT warm-up steps: loss {first['loss']:.3f} → {last['loss']:.3f}"
