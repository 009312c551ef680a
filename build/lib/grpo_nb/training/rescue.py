"""Rescue a base model that earns no reward: before GRPO, try remedies, the cheapest first.

GRPO can only reinforce answers that the model already finds. If no completion of a group is right,
there is nothing to reinforce. The remedies form a ladder. Each rung changes some settings, and is
measured on a few prompts. The ladder ends at the first rung from which GRPO can start.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from grpo_nb import data, models
from grpo_nb.models import Policy
from grpo_nb.reward_lab import RewardTest, bench_of
from grpo_nb.reward_lab.table import Row
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import NOTEBOOKS, Run, Stage, write_json
from grpo_nb.runs.config import RunConfig, flatten, resolve, stage_of
from grpo_nb.runs.files import read_json
from grpo_nb.training.pass_rate import MARK, PASS, PROMPTS, SAMPLES, measure, suffices
from grpo_nb.training.warm_up import TRIED, lesson_of, load_untrained, train_and_save, warm_up

REPORT = "rewards/rescue.json"
SFT_STEPS, SFT_ROWS = 200, 128  # for a warm-up that ends early once GRPO can start
SHORTEST = 0.25
FORMS = ("tags", "boxed", "hash")
BETTER = 0.1  # least gain in the share of right completions to advise a rung that does not suffice
NOTHING = (
    "nothing that notebook 2 tried helps: take easier rows (data.source), a teacher "
    "(rescue.teacher), or another base (model.model_path)"
)


class Rescue(NamedTuple):
    """Hold the result of climbing the ladder of remedies.

    table: One line per rung: rung, right (share of the completions), pass@8, zero-advantage (share
        of the groups), distinct, minutes, suffices (whether GRPO can start from it), settings, and
        "why not" (the error, if the rung could not be tried).
    settings: The settings of the rung from which GRPO can start; {} if there is none.
    advice: A sentence with the settings to adopt and their effect, or NOTHING.
    """

    table: pd.DataFrame
    settings: dict[str, Any]
    advice: str


def rescue_base(test: RewardTest) -> Rescue:
    """Climb the ladder, and write the result of each rung to rewards/rescue.json.

    If `rescue.mode` is "auto", the run adopts the settings of the rung that suffices. The notebooks
    that take these settings must then be run again; `python -m grpo_nb run` does so.

    Args:
        test: A test whose rewards passed, and whose base earns nothing from them.

    Returns:
        The rescue, with an empty table if the task has an environment or `rescue.mode` is "none".
    """
    stage = test.stage
    if test.bench.environment or stage.config.rescue.mode == "none":
        return Rescue(pd.DataFrame(), {}, "")
    lines: list[dict[str, Any]] = []
    policy = load_untrained(stage.config)
    warm_up(policy, stage)  # the rung "as it is" is the base that failed, after any warm-up
    for name, changes in _rungs(test):
        began = time.monotonic()
        if "train.sft_steps" in changes:
            policy.close()
        try:
            policy, figures = _climb(name, changes, policy, test)
        except (ValueError, RuntimeError, FileNotFoundError) as error:  # such as an absent teacher
            figures = {"why not": str(error)}
        line = {"rung": name, **figures, "minutes": (time.monotonic() - began) / 60}
        lines.append({**line, "suffices": PASS in figures and suffices(figures)})
        lines[-1]["settings"] = changes
        write_json(stage.run / REPORT, {"rungs": lines})
        if lines[-1]["suffices"]:
            break
    policy.close()
    table = pd.DataFrame(lines).round(3)
    settings = lines[-1]["settings"] if lines[-1]["suffices"] else {}
    sentence = advice(table)
    if settings and stage.config.rescue.mode == "auto":
        stage.change(settings)
        sentence += f". They are adopted: run {NOTEBOOKS[first_stage(settings)]} again"
    elif settings:
        sentence += ". With --set rescue=auto a run adopts them by itself"
    return Rescue(table, settings, sentence)


def adopted(run: Run) -> dict[str, Any]:
    """Return the settings that a rescue adopted; {} if none, or if a later reward test passed."""
    if run.config().rescue.mode != "auto" or read_json(run / "rewards/report.json")["passed"]:
        return {}
    rungs = read_json(run / REPORT)["rungs"] if (run / REPORT).exists() else [{"suffices": False}]
    return rungs[-1]["settings"] if rungs[-1]["suffices"] else {}


def first_stage(settings: Mapping[str, Any]) -> str:
    """Return the stage to restart from: 01 if it takes one of the settings, else 02 (baseline)."""
    return min("02", *map(stage_of, settings))


def advice(table: pd.DataFrame) -> str:
    """Return a sentence on the best rung's settings and effect; NOTHING if no rung helps enough."""
    figures = table.dropna(subset=["right"])
    best, base = figures.sort_values(["suffices", "right"], kind="stable").iloc[-1], figures.iloc[0]
    if not (best["suffices"] or best["right"] >= base["right"] + BETTER):
        return NOTHING
    but = "" if best["suffices"] else ", which is not yet enough for GRPO"
    return (
        f"{best['rung']}: settings = {json.dumps(best['settings'])} makes {best['right']:.0%} of "
        f"the completions right on {PROMPTS} prompts, instead of {base['right']:.0%}, and {PASS} "
        f"{best[PASS]:.2f}, instead of {base[PASS]:.2f}{but}"
    )


def _rungs(test: RewardTest) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each rung that applies, with its changed settings; rungs with training come last."""
    config, rows, bench = test.stage.config, test.rows, test.bench
    yield "as it is", {}
    form, is_preset = bench.preset.form, not config.rewards.preset.endswith(".py")
    if is_preset and config.data.system_prompt == "preset" and form.name in FORMS:
        for other in FORMS:
            if other != form.name:
                yield f"the form {other}", {"rewards.form": other}
    row = rows[PROMPTS] if len(rows) > PROMPTS else rows[0]
    [answer] = data.worked_rows([row], bench.preset)
    asks = "".join(turn["content"] for turn in row["prompt"] if turn["role"] == "system")
    example = f"{asks}\nExample:\n{row['question']}\n{answer['completion'][0]['content']}".strip()
    yield "a worked example", {"data.system_prompt": example}
    cap = 2 * config.train.max_completion_length
    if config.data.max_prompt_tokens + cap <= config.model.max_seq_length:
        yield "twice the length", {"train.max_completion_length": cap}
    if config.train.temperature > 0.7:
        yield "temperature 0.7", {"train.temperature": 0.7}
    if config.data.shortest_share > SHORTEST and len(rows) * SHORTEST >= PROMPTS:
        yield "the shortest rows", {"data.shortest_share": SHORTEST}
    warm = {"train.sft_steps": max(SFT_STEPS, config.train.sft_steps), "train.sft_until": MARK}
    if not config.data.sft_rows:
        warm["data.sft_rows"] = SFT_ROWS
    yield "SFT warm-up on reference answers", warm
    if config.rescue.teacher:
        yield "SFT warm-up on a teacher's answers", warm | {"train.sft_answers": "teacher"}


def _climb(
    name: str, changes: dict[str, Any], policy: Policy, test: RewardTest
) -> tuple[Policy, dict[str, Any]]:
    """Try a rung, and return its policy and the measured figures."""
    stage, rows, _, bench = test
    config = resolve(stage.config.profile, flatten(stage.config), changes)
    if "train.sft_steps" in changes:
        other = Stage(stage.run, "02", config)
        lesson = lesson_of(other, _examples(stage, config, rows), bench)
        policy = load_untrained(config)
        train_and_save(policy, other, lesson, TRIED)
    if "rewards.form" in changes:
        bench = bench_of(config, load_rewards(config.rewards), bench.tokenizer)
    if "data.shortest_share" in changes:
        texts = [json.dumps(row, default=str) for row in rows]
        few = data.shortest(texts, config.data.shortest_share)
        rows = [row for row, is_short in zip(rows, few, strict=True) if is_short]
    prompts = rows[:PROMPTS]
    if {"rewards.form", "data.system_prompt"} & changes.keys():
        asks = data.with_system_prompt(config.data, bench.preset).system_prompt
        prompts = [{**row, "prompt": _asking(row, asks)} for row in prompts]
    progress = models.part_of(stage.progress, 0, len(prompts) * SAMPLES, name)
    return policy, measure(policy, prompts, bench, config, progress)


def _examples(stage: Stage, config: RunConfig, rows: Sequence[Row]) -> list[Row]:
    """Return the rows that notebook 1 keeps for a warm-up, or would keep with these settings."""
    if stage.config.data.sft_rows:
        return data.load(stage.run, "sft")
    return list(rows[len(rows) - min(config.data.sft_rows, len(rows) // 2) :])


def _asking(row: Row, system_prompt: str) -> list[dict[str, Any]]:
    turns = [turn for turn in row["prompt"] if turn["role"] != "system"]
    return [{"role": "system", "content": system_prompt}, *turns]
