"""The linter: faults of a reward that show on a sample, each with its evidence and its fix.

An error makes the verdict fail; a warning is for a person to weigh. Rewards are called as TRL
calls them, several times: as they are, again, in another order, and with other golds.
"""

import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.reward_lab.table import Bench, Row, explain
from grpo_nb.rewards import Scored, declared_range
from grpo_nb.rewards.own import TRLS_OWN, columns_read

NOISE = 1e-6  # scores of one completion that differ by more are not the same
SATURATED = 0.95  # share of the greatest score, mean over the sample
ALIKE = 0.95  # correlation of two rewards
LENGTH_ALIKE = 0.8  # correlation of a reward with length
FILLER = "apples windows rivers tables gardens silver mornings paper"  # words that say nothing
DOMINANT = 0.8  # share of the weighted spread
NONE_SHARE = 0.05
FEW = 64  # completions that a reward is called on more than once
LESS = 0.05  # of a reward's range that the references may earn less than the sample
SLOW_SHARE = 0.2  # of a step


class Finding(NamedTuple):
    """One fault: which rule, of which reward, how we know, and what to change."""

    rule: str
    reward: str
    error: bool
    evidence: str
    fix: str


def lint(
    bench: Bench,
    rows: Sequence[Row],
    completions: Sequence[str],
    step_seconds: float = 0.0,
    batch: int = 64,
) -> list[Finding]:
    """Every finding on a sample, errors first.

    Args:
        bench: The rewards.
        rows: One dataset row for each completion.
        completions: Sampled from the base model; references are added by the linter.
        step_seconds: Predicted duration of a training step without rewards; 0: unknown.
        batch: Completions of a step.
    """
    findings, count = _names(bench, rows[0]), len(completions)
    some = list({row["question"]: row for row in rows}.values())[:FEW]
    references = [bench.preset.reference(row) for row in some]
    # A reward has to stand what training may bring: well-made completions, and an empty one.
    sample = bench.arguments([*rows, *some, some[0]], [*completions, *references, ""])
    scores: dict[str, np.ndarray] = {}
    for func in bench.preset.reward_funcs:
        started = time.perf_counter()
        found = _runs(func, sample, rows[0])
        seconds = (time.perf_counter() - started) * batch / len(sample["completions"])
        if isinstance(found, Finding):
            findings.append(found)
            continue
        scores[func.__name__] = np.array([one.score for one in found[:count]], dtype=float)
        first = func is bench.preset.reward_funcs[0]
        findings += _values(func, found[:count], scores[func.__name__], first)
        findings += _references(func, scores[func.__name__], found[count:-1])
        findings += _stability(func, bench.arguments(rows[:FEW], completions[:FEW]))
        findings += _columns(func, bench, some, references)
        findings += _follows_length(func, bench, rows, completions, scores[func.__name__])
        if step_seconds and seconds > SLOW_SHARE * step_seconds:
            evidence = f"{seconds:.2f} s for {batch} completions; a step takes {step_seconds:.2f} s"
            fix = "make it faster, or declare @reward(parallel=True) where it waits"
            findings.append(Finding("slow", func.__name__, False, evidence, fix))
    findings += _relations(bench, scores)
    return sorted(findings, key=lambda finding: not finding.error)


def _names(bench: Bench, row: Row) -> list[Finding]:
    """Names that meet: two rewards, or a column and what TRL or a reward calls its own."""
    counts = Counter(bench.preset.names)
    found = [
        Finding("duplicate name", name, True, f"{count} rewards have it", ".configured(name=…)")
        for name, count in counts.items()
        if count > 1
    ]
    for column in sorted(set(TRLS_OWN) & row.keys()):
        evidence = f"the data has a column {column!r}, and TRL passes its own under that name"
        found.append(Finding("shadowed column", "all", True, evidence, "rename the column"))
    for func in bench.preset.reward_funcs:
        for option in sorted(set(getattr(func, "option_names", ())) & row.keys()):
            evidence = f"{option!r} is an option of the reward and a column of the data"
            fix = "rename the column, or make the option a parameter before the *"
            found.append(Finding("shadowed column", func.__name__, False, evidence, fix))
    return found


def _runs(func: Callable[..., Any], sample: dict[str, Any], row: Row) -> list[Scored] | Finding:
    """Its scores and reasons; or the finding that it does not run."""
    if missing := [column for column in columns_read(func, required=True) if column not in row]:
        evidence = f"it needs {missing[0]!r}, and the data has {', '.join(sorted(row))}"
        fix = "keep that column in notebook 1 (extra_columns), or rename the parameter"
        return Finding("missing column", func.__name__, True, evidence, fix)
    try:
        return explain(func, sample)
    except Exception as error:  # a user's reward may raise anything: that is the finding
        last = traceback.extract_tb(error.__traceback__)[-1]
        evidence = f"{type(error).__name__}: {error} (line {last.lineno} of {last.name})"
        kinds = {" scores for ": "wrong length", "declared range": "out of range"}
        rule = next((kind for text, kind in kinds.items() if text in str(error)), "raises")
        fix = {
            "wrong length": "return one score for each completion, None included",
            "out of range": "correct the score, or declare @reward(low=…, high=…)",
            "raises": "mend it: training would stop here. The traceback is in the Reward Lab",
        }[rule]
        return Finding(rule, func.__name__, True, evidence, fix)


def _values(func: Callable, scored: list[Scored], scores: np.ndarray, first: bool) -> list[Finding]:
    """What is wrong with the numbers themselves."""
    name, (low, high) = func.__name__, declared_range(func)
    if unfit := sum(map(_not_finite, scored)):
        evidence = f"NaN or infinity for {unfit} of {len(scores)} completions"
        return [Finding("not finite", name, True, evidence, "return None where there is no score")]
    known = scores[~np.isnan(scores)]
    found = []
    if (none := np.isnan(scores).mean()) > NONE_SHARE:
        reason = next((one.reason for one in scored if one.score is None), "")
        evidence = f"None for {none:.0%} of the completions{reason and f', first: {reason}'}"
        fix = "None counts 0 in the total: correct the golds, or drop those rows"
        found.append(Finding("None", name, bool(none == 1), evidence, fix))
    if len(known) and not hasattr(func, "range") and np.abs(known).max() > 1:
        evidence = f"scores from {known.min():.3g} to {known.max():.3g}, and no declared range"
        fix = "score in [0, 1], and put the weight into reward_weights"
        if first:
            fix = f"write {name}.range = (least, greatest) below it: the greatest says correct"
        found.append(Finding("out of range", name, first, evidence, fix))
    if len(known) and np.ptp(known) < NOISE:
        found.append(_constant(name, known[0], low))
    elif len(known) and high > low and (known.mean() - low) / (high - low) > SATURATED and high > 0:
        evidence = f"mean {known.mean():.3f} of at most {high:.3g}"
        fix = "there is little left to learn from it: make it stricter, or leave it out"
        found.append(Finding("saturated", name, False, evidence, fix))
    return found


def _references(func: Callable, sampled: np.ndarray, scored: list[Scored]) -> list[Finding]:
    """Whether what the base model writes earns more than what it is to learn."""
    wanted = np.array([one.score for one in scored], dtype=float)
    low, high = declared_range(func)
    if np.isnan(sampled).all() or np.isnan(wanted).all():
        return []
    earned, other = float(np.nanmean(wanted)), float(np.nanmean(sampled))
    if other - earned <= LESS * (high - low if math.isfinite(high - low) else 1.0):
        return []
    evidence = f"{earned:.2f} for the references, {other:.2f} for the sample, on average"
    fix = "score a reference in the Reward Lab: correct the reward, or what it asks the gold lacks"
    return [Finding("reference earns less", func.__name__, False, evidence, fix)]


def _not_finite(one: Scored) -> bool:
    """Our rewards turn NaN and infinity into None and say so; others hand them on."""
    if one.score is None:
        return one.reason.startswith("the scorer gave ") and "None" not in one.reason
    return not math.isfinite(one.score)


def _raw(func: Callable, arguments: dict[str, Any]) -> np.ndarray:
    """[completions], NaN for None."""
    return np.array([one.score for one in explain(func, arguments)], dtype=float)


def _constant(name: str, score: float, low: float) -> Finding:
    if score <= low:
        evidence = f"{score:.3g} for every completion of the sample"
        fix = "compare its reason with the completions: a wrong extraction, or too hard a task"
        return Finding("never above its minimum", name, False, evidence, fix)
    evidence = f"{score + 0.0:.3g} for every completion of the sample"  # no "-0"
    fix = "it tells nothing apart here: leave it out, unless it guards against what may come"
    return Finding("constant", name, False, evidence, fix)


def _stability(func: Callable, few: dict[str, Any]) -> list[Finding]:
    """Does it give the same again, and the same in another order?"""
    scores = _raw(func, few)
    if (apart := _differences(scores, _raw(func, few))).any():
        evidence = f"{apart.sum()} of {len(scores)} scores changed on a second call"
        fix = "seed it, or set a judge's temperature to 0: noise is learnt as if it were signal"
        return [Finding("not deterministic", func.__name__, True, evidence, fix)]
    order = np.random.default_rng(0).permutation(len(scores))
    shuffled = {
        key: [value[i] for i in order] if isinstance(value, list) else value
        for key, value in few.items()
    }
    if (apart := _differences(scores[order], _raw(func, shuffled))).any():
        evidence = f"{apart.sum()} of {len(scores)} scores changed when the rows were shuffled"
        fix = "score each completion from its own row alone"
        return [Finding("depends on row order", func.__name__, True, evidence, fix)]
    return []


def _differences(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return ~np.isclose(left, right, rtol=0, atol=NOISE, equal_nan=True)


def _columns(func: Callable, bench: Bench, some: list[Row], references: list[str]) -> list[Finding]:
    """A column that is named and lacks, or is named and makes no difference."""
    name, found = func.__name__, []
    right = _raw(func, bench.arguments(some, references))
    for column in columns_read(func):
        if column not in some[0]:
            evidence = f"it reads {column!r}, which the data lacks, so its default is used"
            found.append(Finding("missing column", name, False, evidence, "add the column"))
            continue
        others = _exchanged(some, column)
        if others and _same_scores(func, bench.arguments(others, references), right):
            evidence = f"other values of {column!r} changed no score of {len(some)} references"
            error = func is bench.preset.reward_funcs[0]
            fix = f"use {column!r} in the score, or drop the parameter"
            found.append(Finding("ignores a column", name, error, evidence, fix))
    return found


def _exchanged(rows: list[Row], column: str) -> list[Row]:
    """The rows with another row's value in that column; [] where all values are the same."""
    values = [row[column] for row in rows]
    other = next((value for value in values if value != values[0]), None)
    if other is None:
        return []
    return [{**row, column: other if row[column] != other else values[0]} for row in rows]


def _same_scores(func: Callable, arguments: dict[str, Any], right: np.ndarray) -> bool:
    try:
        return not _differences(_raw(func, arguments), right).any()
    except Exception:  # it read the column: that is all we ask
        return False


def _follows_length(
    func: Callable, bench: Bench, rows: Sequence[Row], texts: Sequence[str], scores: np.ndarray
) -> list[Finding]:
    """Whether more words alone change the score, in the way in which it goes with length.

    What is well made may well be longer: a reward that goes with length is not yet paid by it.
    """
    lengths, earned = pd.Series(list(map(len, texts)), dtype=float), pd.Series(scores)
    if not lengths.std() > 0 or not earned.std() > NOISE:
        return []
    together = earned.corr(lengths)
    if not abs(together) > LENGTH_ALIKE:
        return []
    padded = [[_padded(text, words) for text in texts[:FEW]] for words in ("a", FILLER)]
    one, all_of_them = (_raw(func, bench.arguments(rows[:FEW], made)) for made in padded)
    if not np.nanmean((all_of_them - one) * np.sign(together)) > NOISE:
        return []
    evidence = (
        f"correlation {together:.2f} with the length in characters, and eight words that say "
        f"nothing instead of one change it by {np.nanmean(all_of_them - one):+.2g}"
    )
    fix = "length may be learnt in its place: cap it, or reward what you mean"
    return [Finding("follows length", func.__name__, False, evidence, fix)]


def _padded(text: str, words: str) -> str:
    """The text with words in it: behind the tag or the first word that it begins with."""
    return re.sub(r"^(<\w+>|\S+\s)?", rf"\1{words} ", text, count=1)


def _relations(bench: Bench, scores: dict[str, np.ndarray]) -> list[Finding]:
    """What shows between rewards."""
    frame = pd.DataFrame(scores)
    frame = frame.loc[:, frame.std() > NOISE]
    found = []
    for left, right in combinations(frame, 2):
        if abs(frame[left].corr(frame[right])) > ALIKE:
            evidence = f"correlation {frame[left].corr(frame[right]):.2f} with {right}"
            fix = "they teach the same: leave one out, or count its weight twice"
            found.append(Finding("two rewards alike", left, False, evidence, fix))
    weights = dict(zip(bench.preset.names, bench.preset.reward_weights, strict=True))
    spread = pd.Series({name: abs(weights[name]) * frame[name].std() for name in frame})
    for name in spread.index[1:] if bench.preset.names[0] in spread else spread.index:
        if len(scores) > 1 and spread[name] > DOMINANT * spread.sum():
            evidence = f"{spread[name] / spread.sum():.0%} of the weighted spread is its own"
            fix = "lower its weight: the first reward, which says correct, hardly counts"
            found.append(Finding("dominates the sum", name, False, evidence, fix))
    return found
