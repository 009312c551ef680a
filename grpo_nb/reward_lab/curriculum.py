"""The difficulty filter: train on prompts that the model solves sometimes, easy ones first.

A prompt that is always or never solved gives its group no advantage: its completions cost
time and teach nothing. The pilot that judges the prompts is the one notebook 2 scores.

`rates` is {question: share of its sampled completions that passed}. Prompts that the pilot did
not sample are kept, and count as of middling difficulty.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_nb import data
from grpo_nb.models import chat
from grpo_nb.reward_lab import Bench, pilot
from grpo_nb.reward_lab.table import Row
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Stage, write_json


def by_difficulty(stage: Stage, preset: RewardSet, report: dict[str, Any]) -> dict[str, Any]:
    """Judge `data.difficulty_prompts` prompts, drop those out of the band, and order the rest.

    Args:
        stage: Stage 01, after `data.prepare`.
        preset: Its first reward says whether a completion passed.
        report: What `data.prepare` gave.

    Returns:
        The report with "difficulty", written to data/report.json too; as it was where no
        prompt is to be judged.

    Raises:
        ValueError: No prompt lies in the band.
    """
    config = stage.config.data
    if not config.difficulty_prompts:
        return report
    rows = data.load(stage.run, "train")
    tried = pilot.sample(stage.run, rows[: config.difficulty_prompts], stage.config)
    tokenizer = chat.load_tokenizer(stage.config.model.model_path)
    table = Bench(preset, tokenizer=tokenizer).table(tried.rows, tried.completions_P_G)
    judged = pilot.pass_rates(tried, table, preset)
    rates = dict(zip(judged["question"], judged["pass_rate"], strict=True))
    kept, found = keep_band(rows, rates, config.min_pass_rate, config.max_pass_rate)
    if config.order == "easy_to_hard":
        kept = easy_to_hard(kept, rates)
    data.replace_train(stage.run, kept)
    report = {**report, "train_rows": len(kept), "difficulty": {**found, "judged": len(rates)}}
    write_json(stage.run / "data/report.json", report)
    return report


def keep_band(
    rows: Sequence[Row], rates: Mapping[str, float], low: float = 0.0, high: float = 1.0
) -> tuple[list[Row], dict[str, int]]:
    """The rows with low < pass rate < high, and how many were too hard and too easy."""
    kept = [row for row in rows if low < rates.get(row["question"], (low + high) / 2) < high]
    known = [rates[row["question"]] for row in rows if row["question"] in rates]
    hard, easy = sum(rate <= low for rate in known), sum(rate >= high for rate in known)
    if not kept:
        raise ValueError(
            f"no prompt has a pass rate between {low} and {high}: {hard} are too hard, {easy} too "
            "easy. Widen the band, take another model or data, or teach the format first "
            "(data.priming_rows)"
        )
    return kept, {"rows": len(rows), "too_hard": hard, "too_easy": easy, "kept": len(kept)}


def easy_to_hard(rows: Sequence[Row], rates: Mapping[str, float]) -> list[Row]:
    """The rows by falling pass rate; rows of equal rate stay in order."""
    middle = sum(rates.values()) / len(rates) if rates else 0.5
    return sorted(rows, key=lambda row: -rates.get(row["question"], middle))
