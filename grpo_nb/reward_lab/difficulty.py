"""Measure how difficult the prompts are for the base model, and keep those of medium difficulty.

A prompt that is always or never solved gives its whole group zero advantage: its completions cost
time and teach nothing.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import data, models
from grpo_nb.files import write_json
from grpo_nb.reward_lab.baseline import Baseline, reward_test, sample
from grpo_nb.reward_lab.table import Row, passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import question_key

if TYPE_CHECKING:
    from grpo_nb.runs import Stage
    from grpo_nb.runs.config import DataConfig


def pass_rates(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Return a table with one line per prompt: question, pass_rate, and keep (0 < pass_rate < 1).

    The column question contains the results of `question_key`.
    """
    rates = passed(table, preset).reshape(len(baseline.rows), -1).mean(axis=1)
    frame = pd.DataFrame({"question": [question_key(row) for row in baseline.rows]})
    return frame.assign(pass_rate=rates, keep=(rates > 0) & (rates < 1))


def by_difficulty(
    stage: "Stage", preset: RewardSet, report: dict[str, Any], engine: models.Engine | None = None
) -> dict[str, Any]:
    """Measure the pass rate of `data.difficulty_prompts` prompts, then filter and order the rows.

    Notebook 2 reuses these samples.

    Args:
        stage: Stage 01, after `data.prepare`.
        preset: The rewards; the first one decides whether a completion passes.
        report: The report that `data.prepare` returned.
        engine: A loaded engine, as `sample` takes it.

    Returns:
        The report with "difficulty" added, which is also written to data/report.json; the unchanged
        report if `data.difficulty_prompts` is 0.

    Raises:
        ValueError: No prompt has a pass rate between the limits.
    """
    config = stage.config.data
    if not config.difficulty_prompts:
        return report
    rows = data.load(stage.run, "train")
    first_rows = rows[: config.difficulty_prompts]
    baseline = sample(
        stage.run, first_rows, stage.config, engine, stage.progress, warmed=False, swap=False
    )
    table = reward_test(stage, preset, rows, baseline).table()
    rates = pass_rates(baseline, table, preset).set_index("question")["pass_rate"].to_dict()
    band, counts = keep_band(rows, rates, config)
    data.replace_train(stage.run, band)
    report = {**report, "train_rows": len(band), "difficulty": counts}
    write_json(stage.run / "data/report.json", report)
    return report


def keep_band(
    rows: Sequence[Row], rates: Mapping[str, float], config: "DataConfig"
) -> tuple[list[Row], dict[str, int]]:
    """Return the rows of medium difficulty in the configured order, and counts for the report.

    Args:
        rows: Dataset rows.
        rates: {`question_key` of a row: share of its completions that passed}. Rows without a rate
            are kept, and ordered as if their rate were the mean.
        config: The settings with the limits of the pass rate, and with the order.
    """
    low, high = config.min_pass_rate, config.max_pass_rate
    band = [row for row in rows if low < rates.get(question_key(row), (low + high) / 2) < high]
    hard, easy = sum(r <= low for r in rates.values()), sum(r >= high for r in rates.values())
    if not band:
        raise ValueError(
            f"no prompt has a pass rate between {low} and {high}: {hard} are too hard, {easy} too "
            "easy. Widen the limits, use another model or other data, or teach the format first "
            "(data.sft_rows)"
        )
    if config.order == "easy_to_hard":
        mean = sum(rates.values()) / len(rates)
        band.sort(key=lambda row: -rates.get(question_key(row), mean))
    return band, {"judged": len(rates), "too_hard": hard, "too_easy": easy, "kept": len(band)}
