"""Measure whether the base needs the images, by also sampling with swapped and blank images.

A model that answers without looking is right just as often with another row's image. GRPO then
teaches it to guess, however high its reward is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_nb.checks import Check
from grpo_nb.data.images import variants
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.reward_lab.check import FIXES
from grpo_nb.reward_lab.linter import changed
from grpo_nb.reward_lab.statistics import bootstrap
from grpo_nb.reward_lab.table import Bench, Row, passed
from grpo_nb.rewards.contract import columns_read
from grpo_nb.rewards.prompts import question_key

NEEDED = "pass@1 that needs the images"
FEW = 64  # rows whose references are scored with other images
WITHOUT = "answers without looking"  # the name of the check if its state is "warning"


def figures(bench: Bench, baseline: Baseline) -> dict[str, Any]:
    """Return pass@1 with right, swapped and blank images, each with its 95 % interval.

    All completions are scored with their row's own images and reference answer. If a completion
    that was sampled with swapped or blank images is right, the model was right without looking.

    Args:
        bench: The rewards; the first one decides what is correct.
        baseline: Baseline rollouts.

    Returns:
        {figure: value}; {} if the baseline has no images.
    """
    if not baseline.unseen:
        return {}
    rates = {
        f"pass@1, {way}": _rates(bench, Baseline(baseline.rows, groups))
        for way, groups in {"right images": baseline.samples_P_G, **baseline.unseen}.items()
    }
    right, swapped, blank = rates.values()
    # Right images have to beat swapped or blank ones, whichever have the higher mean.
    rates[NEEDED] = right - (swapped if swapped.mean() >= blank.mean() else blank)
    values = np.stack(list(rates.values()), axis=1)
    ends = np.array([[0, 0, 0, -0.5], [1, 1, 1, 0.5]])
    lows, highs = bootstrap(values, ends).tolist()
    lines = {}
    for name, mean, *interval in zip(rates, values.mean(axis=0), lows, highs, strict=True):
        lines |= {name: float(mean), f"{name}, interval": interval}
    return lines


def _rates(bench: Bench, baseline: Baseline) -> np.ndarray:
    """Return the share of correct completions for each prompt."""
    table = bench.table(baseline.rows, baseline.completions_P_G)
    return passed(table, bench.preset).reshape(len(baseline.rows), -1).mean(axis=1)


def checks(lines: dict[str, Any]) -> list[Check]:
    """Return a check that warns if right answers may not need the images; [] without images."""
    if not lines:
        return []
    parts = []
    for name, value in lines.items():
        if not name.endswith("interval"):
            low, high = lines[f"{name}, interval"]
            parts.append(f"{name} {value:.0%} ({low:.0%} to {high:.0%})")
    guesses = lines["pass@1, right images"] > 0 and lines[f"{NEEDED}, interval"][0] <= 0
    fix = "ask what only the image shows, vary the answers, or take a base with better vision"
    if guesses:
        return [Check(WITHOUT, "warning", "; ".join(parts), fix)]
    return [Check("images", "ok", "; ".join(parts))]


def images(bench: Bench, rows: Sequence[Row]) -> list[Check]:
    """Return a warning for each reward that ignores its `images`, or reads images unnamed."""
    rows = list({question_key(row): row for row in rows}.values())[:FEW]
    if not (versions := variants(rows)):
        return []
    references, result = list(map(bench.preset.reference, rows)), []
    before = bench.score(rows, references)
    after = {way: bench.score(others, references) for way, others in versions.items()}
    for number, func in enumerate(bench.preset.reward_funcs):
        counts = {way: changed(before[:, number], s[:, number]) for way, s in after.items()}
        reads, equal = "images" in columns_read(func), [way for way in counts if not counts[way]]
        if reads and equal:
            evidence = f"for all of {len(rows)} references, with {' and '.join(equal)} images"
            result.append((func, "pays the same for other images", evidence))
        if not reads and any(counts.values()):
            evidence = f"other images change the scores of {max(counts.values())} references"
            result.append((func, "reads images unnamed", evidence))
    return [
        Check(f"{func.__name__}: {rule}", "warning", evidence, FIXES[rule])
        for func, rule, evidence in result
    ]
