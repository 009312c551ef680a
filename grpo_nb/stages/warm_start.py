"""Fine-tune on right answers before GRPO, so that the model solves some prompts at all.

The answers are those of data/sft.parquet, with their steps if the source has them. Without steps no
reasoning is taught, and the sentence on the warm-up says so.
The warm-up takes `train.sft_steps` steps; with `train.sft_until` it ends as soon as GRPO can start.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from grpo_nb import data, models, ranks
from grpo_nb.files import atomic_path, read_json, write_json
from grpo_nb.models import Policy
from grpo_nb.reward_lab import bench_of
from grpo_nb.reward_lab.baseline import WARMED
from grpo_nb.reward_lab.table import Row
from grpo_nb.rewards import load_rewards
from grpo_nb.rewards.prompts import json_key
from grpo_nb.stages import checkpoints
from grpo_nb.stages.pass_rate import PASS, PROMPTS, measure

if TYPE_CHECKING:
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import RunConfig


def warm_up_base(stage: "Stage") -> str:
    """Do the SFT warm-up first, so that the baseline measures the policy that GRPO starts from.

    Returns:
        A sentence that describes the warm-up.
    """
    config, about = stage.config, _saved(stage)
    if config.train.sft_steps and not about:
        with closing(load_untrained(config)) as policy:
            about = _train_and_save(policy, stage)
    return _sentence(about)


def load_untrained(config: "RunConfig") -> Policy:
    """Load the policy as GRPO would, but without vLLM, which stage 02 does not need."""
    model = config.model.model_copy(update={"fast_inference": "off"})
    return models.load_policy(config.model_copy(update={"model": model}))


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


def warm_up_curve(run: "Run") -> list[dict[str, Any]]:
    """Return the metrics of the run's warm-up, one line per step; [] without a warm-up.

    Each line has the loss. With `train.sft_until`, some lines also have the figures of
    `pass_rate.measure`.
    """
    path = run / WARMED / "about.json"
    return read_json(path)["lines"] if path.exists() else []


def _train_and_save(policy: Policy, stage: "Stage") -> dict[str, Any]:
    """Train the policy on right answers, save its weights, and return the content of about.json."""
    from grpo_nb.stages.sft import train_on  # Unsloth has to be imported before TRL

    config, rows, look = stage.config, data.load(stage.run, "sft"), None
    bench = bench_of(config, load_rewards(config.rewards), policy.tokenizer)
    if config.train.sft_until:
        prompts = data.load(stage.run, "train", max_rows=PROMPTS)  # not in the warm-up
        look = partial(measure, policy, prompts, bench, config)
    has_own = "reference" in (bench.preset.own or {})
    about = {"of": _identity(config, rows), "rows": len(rows)}
    about["without steps"] = 0 if has_own else sum(not row.get("worked") for row in rows)
    about["lines"], about["end"] = train_on(
        policy, stage, data.worked_rows(rows, bench.preset), look
    )

    def save() -> None:
        with atomic_path(stage.run / WARMED) as temporary:
            checkpoints.save_trained(policy.model, temporary)
            policy.tokenizer.save_pretrained(temporary)
            write_json(temporary / "about.json", about)
            checkpoints.seal(temporary)

    ranks.from_main(save)
    return about


def _saved(stage: "Stage") -> dict[str, Any]:
    """Return about.json of the saved warm-up; {} if there is none for these settings."""
    folder = stage.run / WARMED
    if stage.config.train.sft_steps and checkpoints.whole_or_aside(folder):
        about = read_json(folder / "about.json")
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
    text = f"{last['step']} SFT warm-up steps: loss {first['loss']:.3f} → {last['loss']:.3f}"
    looks = [line for line in about["lines"] if PASS in line]
    if looks:
        text += f", {PASS} {looks[0][PASS]:.2f} → {looks[-1][PASS]:.2f}"
    plain, rows = about.get("without steps", 0), about.get("rows", 0)
    note = f"{plain} of {rows} rows hold no steps, so that only their answers were taught"
    return "; ".join(filter(None, [text, about["end"], note if plain else ""]))
