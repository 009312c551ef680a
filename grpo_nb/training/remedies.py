"""Try remedies for a base that earns nothing, on a few prompts and before any training.

GRPO makes more likely what the model already finds. If no completion of a group is right, there
is nothing to find, and easier rows or more steps do not help; showing the model the format often
does. Each remedy is measured on the same prompts, and named by the settings that adopt it.
"""

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd

from grpo_nb import data, models
from grpo_nb.answers import find_form
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.reward_lab.baseline import pass_at_k, passed
from grpo_nb.reward_lab.table import Row
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import Stage
from grpo_nb.runs.config import RunConfig, flatten, resolve
from grpo_nb.training.warm_up import train_on, warm_up

PROMPTS, SAMPLES = 16, 4
STEPS, SFT_ROWS = 12, 64
FORMS = ("tags", "boxed", "hash")
BETTER = 0.1  # more completions that are right, for a remedy to be recommended


class Remedy(NamedTuple):
    """Name a remedy for the reader, and hold the settings that adopt it."""

    name: str
    settings: dict[str, Any]
    system_prompt: str | None = None


def try_remedies(stage: Stage, bench: Bench, rows: Sequence[Row]) -> pd.DataFrame:
    """Measure each remedy on the first prompts; the best one comes first.

    Args:
        stage: Stage 02.
        bench: The rewards that earn nothing.
        rows: Training rows: the first are the prompts, the next ones the warm-up's examples.

    Returns:
        One line per remedy: remedy, right (share of the completions), `pass@4`, zero-advantage
        (share of the groups), seconds, and settings, which are empty for the base as it is. A task
        with an environment gives no lines.
    """
    if bench.environment:
        return pd.DataFrame()
    config = stage.config
    model = config.model.model_copy(update={"fast_inference": "off"})
    policy = models.load_policy(model, config.seed, config.policy)
    warm_up(policy, stage)  # "as it is" is what failed, after its warm-up if it has one
    lines, remedies = [], list(_remedies(config, bench, rows))
    for number, remedy in enumerate(remedies):
        before, total = (PROMPTS * SAMPLES * count for count in (number, len(remedies)))
        progress = models.part_of(stage.progress, before, total, remedy.name)
        adopted = resolve(config.profile, flatten(config), remedy.settings)
        began = time.monotonic()
        if "train.sft_steps" in remedy.settings:
            examples = data.worked_rows(rows[PROMPTS:][: adopted.data.sft_rows], bench.preset)
            more = resolve(config.profile, flatten(adopted), {"train.sft_steps": STEPS})
            train_on(policy, Stage(stage.run, "02", more), examples)
        line = _measure(policy, adopted, bench, rows[:PROMPTS], remedy, progress)
        lines.append({**line, "seconds": time.monotonic() - began, "settings": remedy.settings})
    policy.close()
    best_first = {"by": ["right", "zero-advantage"], "ascending": [False, True]}
    return pd.DataFrame(lines).sort_values(**best_first, kind="stable")


def advice(remedies: pd.DataFrame) -> str:
    """Return the line that adopts the best remedy; "" if none is better than the base as it is.

    Args:
        remedies: The table of `try_remedies`.
    """
    if remedies.empty:
        return ""
    best, base = remedies.iloc[0], remedies[remedies["settings"].map(len) == 0].iloc[0]
    if best["right"] < base["right"] + BETTER:
        return ""
    return (
        f"{best['remedy']}: settings = {json.dumps(best['settings'])} makes {best['right']:.0%} of "
        f"the completions right on {PROMPTS} prompts, instead of {base['right']:.0%}"
    )


def _remedies(config: RunConfig, bench: Bench, rows: Sequence[Row]) -> Iterator[Remedy]:
    """Yield the remedies that apply, the base as it is first, and the warm-up last."""
    yield Remedy("as it is", {})
    form, is_preset = bench.preset.form, not config.rewards.preset.endswith(".py")
    if is_preset and config.data.system_prompt == "preset" and form.name in FORMS:
        for other in FORMS:
            if other != form.name:
                asks = find_form(other).system_prompt
                yield Remedy(f"the form {other}", {"rewards.form": other}, asks)
    row = rows[PROMPTS] if len(rows) > PROMPTS else rows[0]
    [answer] = data.worked_rows([row], bench.preset)
    asks = "".join(turn["content"] for turn in row["prompt"] if turn["role"] == "system")
    example = f"{asks}\nExample:\n{row['question']}\n{answer['completion'][0]['content']}".strip()
    yield Remedy("a worked example", {"data.system_prompt": example}, example)
    cap = 2 * config.train.max_completion_length
    if config.data.max_prompt_tokens + cap <= config.model.max_seq_length:
        yield Remedy("twice the length", {"train.max_completion_length": cap})
    if config.train.temperature > 0.7:
        yield Remedy("temperature 0.7", {"train.temperature": 0.7})
    if len(rows) > PROMPTS:
        warm = {"train.sft_steps": config.train.sft_steps + STEPS}
        if not config.data.sft_rows:
            warm["data.sft_rows"] = SFT_ROWS
        more = "more " if config.train.sft_steps else ""
        yield Remedy(f"{STEPS} {more}SFT warm-up steps", warm)


def _measure(
    policy: models.Policy,
    config: RunConfig,
    bench: Bench,
    rows: Sequence[Row],
    remedy: Remedy,
    progress: models.Progress,
) -> dict[str, Any]:
    """Return the figures of the policy with a remedy."""
    if "rewards.form" in remedy.settings:
        bench = bench_of(config, load_rewards(config.rewards), bench.tokenizer)
    if remedy.system_prompt is not None:
        rows = [{**row, "prompt": _asking(row, remedy.system_prompt)} for row in rows]
    groups = policy.generate(
        [row["prompt"] for row in rows],
        max_completion_length=config.train.max_completion_length,
        temperature=config.train.temperature,
        num_generations=SAMPLES,
        seed=config.seed,
        batch_size=config.step_completions,
        progress=progress,
    )
    table = bench.table(rows, [[sample.text for sample in group] for group in groups])
    right_P_G = passed(table, bench.preset).reshape(len(rows), SAMPLES)
    figures = {"right": right_P_G.mean(), f"pass@{SAMPLES}": pass_at_k(right_P_G, SAMPLES).mean()}
    return {"remedy": remedy.name, **figures, "zero-advantage": 1 - table["signal"].mean()}


def _asking(row: Row, system_prompt: str) -> list[dict[str, Any]]:
    turns = [turn for turn in row["prompt"] if turn["role"] != "system"]
    return [{"role": "system", "content": system_prompt}, *turns]
