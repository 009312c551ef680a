"""Advise on a base model that earns no reward: try two remedies on a few prompts.

GRPO can only reinforce answers that the model already finds. If no completion of a group is right,
there is nothing to reinforce. A worked example in the prompt may help, or a supervised warm-up on
right answers.
"""

import json
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from grpo_nb import data, models
from grpo_nb.reward_lab import RewardTest
from grpo_nb.reward_lab.table import Row
from grpo_nb.runs import Stage
from grpo_nb.runs.config import RunConfig, flatten, resolve
from grpo_nb.stages.pass_rate import MARK, PASS, PROMPTS, SAMPLES, measure, suffices
from grpo_nb.stages.warm_start import load_untrained, warm_up

SFT_STEPS, SFT_ROWS = 200, 128  # for a warm-up that ends early once GRPO can start
BETTER = 0.1  # least gain in right completions to advise a remedy that does not suffice
NOTHING = (
    "neither a worked example nor a warm-up helps: take easier rows (data.source), answers with "
    "their steps, or another base (model.model_name)"
)


class Rescue(NamedTuple):
    """Hold what the remedies did.

    table: One line per remedy: remedy, right (share of the completions), pass@8, zero-advantage
        (share of the groups), distinct, entropy, suffices (whether GRPO can start from it) and
        settings.
    advice: A sentence with the settings to take and their effect, or NOTHING.
    """

    table: pd.DataFrame
    advice: str


def rescue_base(test: RewardTest) -> Rescue:
    """Try a worked example, then a warm-up, on the same prompts; end at the first that suffices.

    Args:
        test: A test whose rewards passed, and whose base earns nothing from them.

    Returns:
        The rescue, with an empty table if the task has an environment: a reference answer does not
        say which calls lead to it.
    """
    stage, rows, _, bench = test
    if bench.environment:
        return Rescue(pd.DataFrame(), "")
    prompts, lines = rows[:PROMPTS], []
    with closing(load_untrained(stage.config)) as policy:
        warm_up(policy, stage)  # "as it is" is the base that failed, after any warm-up
        for remedy, settings in _remedies(test).items():
            config = resolve(stage.config.profile, flatten(stage.config), settings)
            rows_asking = [_asking(row, settings) for row in prompts]
            progress = models.part_of(stage.progress, 0, len(prompts) * SAMPLES, remedy)
            look = partial(measure, policy, rows_asking, bench, config)
            if "train.sft_steps" in settings:
                from grpo_nb.stages.sft import train_on  # Unsloth is imported before TRL

                examples = data.worked_rows(_examples(stage, config, rows), bench.preset)
                train_on(policy, Stage(stage.run, "02", config), examples, look)
            figures = look(progress=progress)
            lines.append({"remedy": remedy, **figures, "suffices": suffices(figures)})
            lines[-1]["settings"] = settings
            if lines[-1]["suffices"]:
                break
    table = pd.DataFrame(lines).round(3)
    return Rescue(table, advice(table))


def advice(table: pd.DataFrame) -> str:
    """Return a sentence on the best remedy's settings and effect; NOTHING if none helps enough."""
    best, base = table.sort_values(["suffices", "right"], kind="stable").iloc[-1], table.iloc[0]
    if not (best["suffices"] or best["right"] >= base["right"] + BETTER):
        return NOTHING
    but = "" if best["suffices"] else ", which is not yet enough for GRPO"
    return (
        f"{best['remedy']}: settings = {json.dumps(best['settings'])} makes {best['right']:.0%} of "
        f"the completions right on {PROMPTS} prompts, instead of {base['right']:.0%}, and {PASS} "
        f"{best[PASS]:.2f}, instead of {base[PASS]:.2f}{but}"
    )


def _remedies(test: RewardTest) -> dict[str, dict[str, Any]]:
    """Return the settings of each remedy."""
    config, rows = test.stage.config, test.rows
    row = rows[PROMPTS] if len(rows) > PROMPTS else rows[0]
    [answer] = data.worked_rows([row], test.bench.preset)
    asks = "".join(turn["content"] for turn in row["prompt"] if turn["role"] == "system")
    example = f"{asks}\nExample:\n{row['question']}\n{answer['completion'][0]['content']}".strip()
    warm = {"train.sft_steps": max(SFT_STEPS, 4 * config.train.sft_steps), "train.sft_until": MARK}
    warm |= {} if config.data.sft_rows else {"data.sft_rows": SFT_ROWS}
    return {"as it is": {}, "a worked example": {"data.system_prompt": example}, "a warm-up": warm}


def _examples(stage: Stage, config: RunConfig, rows: list[Row]) -> list[Row]:
    """Return the rows that notebook 1 keeps for a warm-up, or would keep with these settings."""
    if stage.config.data.sft_rows:
        return data.load(stage.run, "sft")
    return rows[len(rows) - min(config.data.sft_rows, len(rows) // 2) :]


def _asking(row: Row, settings: dict[str, Any]) -> Row:
    """Return the row with the system prompt of these settings."""
    if "data.system_prompt" not in settings:
        return row
    turns = [turn for turn in row["prompt"] if turn["role"] != "system"]
    system = {"role": "system", "content": settings["data.system_prompt"]}
    return {**row, "prompt": [system, *turns]}
