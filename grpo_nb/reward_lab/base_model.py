"""Describe the base model by its baseline rollouts: what it solves, and the lengths it needs."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_nb import models
from grpo_nb.checks import Check
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.reward_lab.table import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.stats import pass_at_k

if TYPE_CHECKING:
    from grpo_nb.runs.config import RunConfig

BASE = "base model"  # the name of the check on the base model
WARM_UP = "an SFT warm-up (data.sft_rows = 64 and train.sft_steps = 12, or more)"
EASIER = "{}, easier rows (data.source), or another base (model.model_name)"
HARDER = "harder rows (data.source)"
MOSTLY = 0.5  # share of zero-advantage groups above which a base that is never right learns little
SPARE = 1.25  # recommended cap, relative to the 99th percentile of the baseline's lengths


def flagged(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Return the score table with the columns correct, truncated and tokens added."""
    samples = baseline.samples
    return table.assign(
        correct=passed(table, preset),
        truncated=[each.truncated for each in samples],
        tokens=[each.tokens for each in samples],
    )


def pass_rates(baseline: Baseline, table: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Return a table with one line per prompt: question, pass_rate, and keep (0 < pass_rate < 1).

    A prompt that is always or never solved gives its whole group zero advantage.
    """
    rates = passed(table, preset).reshape(len(baseline.rows), -1).mean(axis=1)
    frame = pd.DataFrame({"question": [row["question"] for row in baseline.rows]})
    return frame.assign(pass_rate=rates, keep=(rates > 0) & (rates < 1))


def summary(
    baseline: Baseline, table: pd.DataFrame, preset: RewardSet, config: "RunConfig"
) -> dict[str, Any]:
    """Return figures that describe the model before training.

    Args:
        baseline: Baseline rollouts.
        table: Their score table.
        preset: The rewards; the first one decides what counts as correct.
        config: The run's configuration, with the `max_completion_length` of training.
    """
    lines, group = flagged(baseline, table, preset), len(baseline.samples_P_G[0])
    right, tokens = lines["correct"].to_numpy().reshape(-1, group), lines["tokens"]
    solved = right.mean(axis=1)
    length = recommended_length(baseline.samples, config.grpo.max_completion_length)
    return {
        "prompts": len(baseline.rows),
        "completions per prompt": group,
        **{f"pass@{k}": float(pass_at_k(right, k).mean()) for k in (1, 2, 4, 8, 16) if k <= group},
        "prompts never solved": int((solved == 0).sum()),
        "prompts always solved": int((solved == 1).sum()),
        "prompts to keep": int(((solved > 0) & (solved < 1)).sum()),
        "share of zero-advantage groups": float(1 - table["signal"].mean()),
        "share of groups all right or all wrong": float(((solved == 0) | (solved == 1)).mean()),
        "share truncated": float(lines["truncated"].mean()),
        "completion tokens, mean": float(tokens.mean()),
        "completion tokens, p95": float(tokens.quantile(0.95)),
        "completion tokens, max": int(tokens.max()),
        "max_completion_length": config.grpo.max_completion_length,
        "recommended max_completion_length": length,
    }


def checks(figures: Mapping[str, Any], warm_steps: int = 0) -> list[Check]:
    """Check whether there is anything to learn, and whether the maximum length is sufficient.

    Args:
        figures: The figures that `summary` returned.
        warm_steps: Steps of the SFT warm-up after which the baseline was sampled; 0 for none.
    """
    rate, silent = figures["pass@1"], figures["share of zero-advantage groups"]
    subject = "the base after its warm-up" if warm_steps else "the base"
    base, state, fix = "", "ok" if 0 < rate < 1 else "warning", ""
    if silent == 1 or (rate == 0 and silent > MOSTLY):
        state = "stop"
        outcomes = {0: "does not solve this", 1: "always solves this"}
        base = f"{subject} {outcomes.get(rate, 'has one score for each prompt')}: "
    base += f"right in {rate:.1%} of its samples; {silent:.0%} zero-advantage groups"
    base += f", {figures['share of groups all right or all wrong']:.0%} all right or all wrong"
    if state != "ok":
        longer = f"a longer SFT warm-up (train.sft_steps = {4 * warm_steps}, more data.sft_rows)"
        fix = HARDER if rate == 1 else EASIER.format(longer if warm_steps else WARM_UP)
    cap, best = figures["max_completion_length"], figures["recommended max_completion_length"]
    cut, p95 = figures["share truncated"], figures["completion tokens, p95"]
    fits = cap >= best or (cut <= 0.05 and cap >= p95)
    usage = f"95 % of its completions have at most {p95:.0f} tokens, {cut:.0%} were cut; cap {cap}"
    length_fix = "" if fits else f"set grpo.max_completion_length = {best}"
    return [
        Check(BASE, state, base, fix),
        Check("completion length", "ok" if fits else "warning", usage, length_fix),
    ]


def recommended_length(samples: Sequence[models.Sample], cap_tokens: int) -> int:
    """Recommend max_completion_length from the lengths of completions: more if many were cut.

    >>> recommended_length([models.Sample("", 20, False)] * 99, 100)
    32
    """
    if sum(each.truncated for each in samples) > 0.05 * len(samples):
        return 2 * cap_tokens
    longest = float(np.quantile([each.tokens for each in samples if not each.truncated], 0.99))
    return 8 * math.ceil(SPARE * longest / 8)
