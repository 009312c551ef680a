"""Find faults in rewards on a sample of completions, each with evidence and a fix.

A "stop" makes the verdict fail; a "warning" is for the user to judge. Rewards are called as in TRL,
and more than once: twice on the same rows, and once on the rows in another order.
"""

import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb.data.images import variants
from grpo_nb.reward_lab.table import Bench, Row, explain
from grpo_nb.rewards import Scored, declared_range
from grpo_nb.rewards.contract import columns_read
from grpo_nb.rewards.prompts import question_key
from grpo_nb.runs import Check
from grpo_nb.runs.files import read_yaml

NOISE = 1e-6  # largest difference between scores that count as equal
SATURATED = 0.95  # mean over the sample, as a share of the reward's range
NONE_SHARE = 0.05
FEW = 64  # completions that a reward scores more than once
FIXES = read_yaml(Path(__file__).with_name("linter.yaml"))  # {rule: what to do}
# A "stop" by one of these rules ends the test.
UNUSABLE = ("raises", "out of range", "missing column")
Finding = tuple[str, str, bool]  # rule, evidence, whether the state is "stop"


def lint(bench: Bench, rows: Sequence[Row], completions: Sequence[str]) -> list[Check]:
    """Return a check "REWARD: RULE" for each fault that is found, those with "stop" first.

    Args:
        bench: The rewards under test.
        rows: One dataset row for each completion.
        completions: Completions of the base model; the linter adds the references itself.
    """
    distinct = _distinct(rows)
    # Training may produce perfect completions and empty ones, so a reward must accept both.
    texts = [*completions, *map(bench.preset.reference, distinct), ""]
    sample = bench.arguments([*rows, *distinct, distinct[0]], texts)
    checks = [
        Check(f"{func.__name__}: {rule}", "stop" if stop else "warning", evidence, FIXES[rule])
        for func in bench.preset.reward_funcs
        for rule, evidence, stop in _findings(func, bench, rows, completions, sample)
    ]
    return sorted(checks, key=lambda check: check.state != "stop")


def _distinct(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each of the first FEW distinct questions."""
    return list({question_key(row): row for row in rows}.values())[:FEW]


def usable(findings: Sequence[Check]) -> bool:
    """Return whether rewards with these findings can be used to score attacks."""
    return not any(each.state == "stop" and each.name.endswith(UNUSABLE) for each in findings)


def _findings(
    func: Callable, bench: Bench, rows: Sequence[Row], completions: Sequence, sample: dict
) -> Iterator[Finding]:
    """Yield the faults of one reward; if it cannot run on the sample, stop at that fault."""
    if absent := [column for column in columns_read(func) if column not in rows[0]]:
        needs = not set(absent).isdisjoint(columns_read(func, required=True))
        yield "missing column", f"it reads {absent}, and the data has {sorted(rows[0])}", needs
        if needs:
            return
    try:
        results = explain(func, sample)
    except Exception as error:  # a user's reward may raise anything; that is a finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        evidence = f"{type(error).__name__}: {error} (line {last.lineno} of {last.name})"
        yield "raises", evidence, True
        return
    yield from _values(func, results[: len(rows)], func is bench.preset.reward_funcs[0])
    yield from _stability(func, bench.arguments(rows[:FEW], completions[:FEW]))
    yield from _images(func, bench, _distinct(rows))


def _scores(func: Callable, arguments: dict[str, Any]) -> np.ndarray:
    """Return the scores as an array, [completions], with NaN for None."""
    return np.array([each.score for each in explain(func, arguments)], dtype=float)


def _values(func: Callable, results: list[Scored], first: bool) -> Iterator[Finding]:
    """Yield faults in the scores of one call."""
    scores = np.array([each.score for each in results], dtype=float)
    low, high = declared_range(func)
    finite, none_share = scores[~np.isnan(scores)], np.isnan(scores).mean()
    if unfit := sum(map(_not_finite, results)):
        yield "not finite", f"NaN or infinity for {unfit} of {len(scores)} completions", True
        return
    if none_share > NONE_SHARE:
        reason = next((each.reason for each in results if each.score is None), "")
        evidence = f"None for {none_share:.0%} of the completions{reason and f', first: {reason}'}"
        yield "None", evidence, bool(none_share == 1)
    if not len(finite):
        return
    if not hasattr(func, "range") and np.abs(finite).max() > 1:
        evidence = f"scores from {finite.min():.3g} to {finite.max():.3g}, but no range is declared"
        yield "out of range", evidence, first
    if np.ptp(finite) < NOISE:
        rule = "constant" if finite[0] > low else "never above its minimum"
        yield rule, f"{finite[0] + 0.0:.3g} for every completion of the sample", False  # no "-0"
    elif high > max(low, 0) and (finite.mean() - low) / (high - low) > SATURATED:
        yield "saturated", f"mean {finite.mean():.3f} of at most {high:.3g}", False


def _not_finite(result: Scored) -> bool:
    """Return whether a score was NaN or infinite, even if `@reward` replaced it by None."""
    if result.score is None:
        return result.reason.startswith("the scorer gave ") and "None" not in result.reason
    return not math.isfinite(result.score)


def _stability(func: Callable, few: dict[str, Any]) -> Iterator[Finding]:
    """Yield a fault if scores change on a second call, or with the rows in another order."""
    scores = _scores(func, few)
    if count := _changed(scores, _scores(func, few)):
        yield "not deterministic", f"{count} of {len(scores)} scores changed on a second call", True
        return
    order = np.random.default_rng(0).permutation(len(scores))
    shuffled = {
        key: [value[i] for i in order] if isinstance(value, list) else value
        for key, value in few.items()
    }
    if count := _changed(scores[order], _scores(func, shuffled)):
        evidence = f"{count} of {len(scores)} scores changed when the rows were shuffled"
        yield "depends on row order", evidence, True


def _images(func: Callable, bench: Bench, rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield a fault if a reward ignores its `images`, or reads images without that parameter."""
    if not (versions := variants(rows)):
        return
    references = list(map(bench.preset.reference, rows))
    before, counts = _scores(func, bench.arguments(rows, references)), {}
    for way, others in versions.items():
        counts[way] = _changed(before, _scores(func, bench.arguments(others, references)))
    reads, equal = "images" in columns_read(func), [way for way in counts if not counts[way]]
    if reads and equal:
        evidence = f"for all of {len(rows)} references, with {' and '.join(equal)} images"
        yield "pays the same for other images", evidence, False
    if not reads and any(counts.values()):
        evidence = f"other images change the scores of {max(counts.values())} references"
        yield "reads images unnamed", evidence, False


def _changed(before: np.ndarray, after: np.ndarray) -> int:
    return int((~np.isclose(before, after, rtol=0, atol=NOISE, equal_nan=True)).sum())
