"""Measure whether the base needs the images: it answers with other images and with grey ones, too.

A model that answers without looking is right as often with another row's image. It then learns
from GRPO to guess, however high its reward.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_nb.reward_lab.baseline import Baseline, passed
from grpo_nb.reward_lab.statistics import bootstrap
from grpo_nb.reward_lab.table import Bench, Row
from grpo_nb.rewards.prompts import as_text, question_key, with_images
from grpo_nb.runs import Check

SWAPPED, BLANK = "swapped", "blank"
NEEDED = "pass@1 that needs the images"


def variants(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows with the images of another row each, and with grey ones of the same size.

    Each row gets the images of the row so many places further on, as many as give most rows other
    images and another answer.

    Returns:
        {SWAPPED: rows, BLANK: rows}; {} if there are no images, or no two rows to swap them.
    """
    if len(rows) < 2 or "images" not in rows[0]:
        return {}
    from PIL import Image

    keys = [question_key(row | {"question": ""}) for row in rows]
    answers, count = [str(row["answer"]) for row in rows], len(rows)

    def differing(shift: int) -> int:
        others = [(place + shift) % count for place in range(count)]
        return sum(keys[i] != keys[j] and answers[i] != answers[j] for i, j in enumerate(others))

    shift = max(range(1, count), key=differing)
    swapped = [rows[(place + shift) % count]["images"] for place in range(count)]
    blank = [[Image.new("RGB", each.size, "grey") for each in row["images"]] for row in rows]
    return {SWAPPED: list(map(_shown, rows, swapped)), BLANK: list(map(_shown, rows, blank))}


def _shown(row: Row, images: list[Any]) -> Row:
    """Return a row with other images."""
    return row | {"images": images, "prompt": with_images(as_text(row["prompt"]), images)}


def figures(bench: Bench, baseline: Baseline) -> dict[str, Any]:
    """Return pass@1 with swapped and with blank images, each with its 95 % interval.

    The completions are scored with the row's own images and reference answer. What is right of
    them was right without looking.

    Args:
        bench: The rewards; the first one decides what is correct.
        baseline: Baseline rollouts, with those of the `variants` under "unseen".

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
    # The better of the two guesses, of all prompts together: it is what looking has to beat.
    rates[NEEDED] = right - (swapped if swapped.mean() >= blank.mean() else blank)
    values = np.stack(list(rates.values()), axis=1)
    ends = np.array([[0, 0, 0, -0.5], [1, 1, 1, 0.5]])
    lows, highs = bootstrap(values, ends).tolist()
    lines = {}
    for name, mean, *interval in zip(rates, values.mean(axis=0), lows, highs, strict=True):
        lines |= {name: float(mean), f"{name}, interval": interval}
    return lines


def _rates(bench: Bench, baseline: Baseline) -> np.ndarray:
    """Return the share of correct completions of each prompt."""
    table = bench.table(baseline.rows, baseline.completions_P_G)
    return passed(table, bench.preset).reshape(len(baseline.rows), -1).mean(axis=1)


def checks(lines: dict[str, Any]) -> list[Check]:
    """Warn if pass@1 is no higher with the right images than without them, within its interval."""
    if not lines:
        return []
    parts = []
    for name, value in lines.items():
        if not name.endswith("interval"):
            low, high = lines[f"{name}, interval"]
            parts.append(f"{name} {value:.0%} ({low:.0%} to {high:.0%})")
    guesses = lines["pass@1, right images"] > 0 and lines[f"{NEEDED}, interval"][0] <= 0
    fix = "ask what only the image tells, vary the answers, or take a base that sees better"
    name = "answers without looking" if guesses else "looks at the images"
    return [Check(name, "warning" if guesses else "ok", "; ".join(parts), fix if guesses else "")]
