"""Which prompts teach: those that the model solves sometimes, as a pilot tells.

`rates` is {question: share of its sampled completions that passed}. Prompts that the pilot did
not sample are kept, and count as of middling difficulty.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

from grpo_nb.data.sources import Row


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


def buckets(rows: Sequence[Row], rates: Mapping[str, float], count: int) -> list[list[Row]]:
    """`count` stages of nearly equal size, the easiest rows first."""
    ordered = easy_to_hard(rows, rates)
    ends = [round(len(ordered) * place / count) for place in range(count + 1)]
    return [ordered[start:end] for start, end in pairwise(ends)]
