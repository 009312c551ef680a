"""Say where a training stands in one sentence, and choose what a dashboard shows of a step."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any

from grpo_nb.stats import wilson

SOLVED = 0.98  # share of right answers in validation from which more training is a waste of time
SILENT = 0.9  # share of groups without a signal, mean over FEW steps, that is worth a warning
FEW = 5  # steps of such a mean
SHOWN = 8  # completions of a group
CHARACTERS = 1_500  # of a completion, or of a question
TEXTS = {"question", "completion", "reward", "advantage", "images"}
Line = Mapping[str, float]


def with_spread(line: Line) -> dict[str, float]:
    """Add the share of groups with a signal, and the ends of a band around the reward."""
    more = {}
    if "frac_reward_zero_std" in line:
        more["groups/signal"] = 1 - line["frac_reward_zero_std"]
    if "reward" in line and "reward_std" in line:
        mean, spread = line["reward"], line["reward_std"]
        more["reward/low"] = line.get("groups/reward_p10", mean - spread)
        more["reward/high"] = line.get("groups/reward_p90", mean + spread)
    left_out = {"eval/reward"} if "eval/accuracy" in line else set()  # the one says it all
    return {key: value for key, value in {**line, **more}.items() if key not in left_out}


def before_training(lines: Sequence[Line], prompts: int) -> list[float]:
    """Return the first validation and its 95 % interval; [] if the first step had none.

    Args:
        lines: The lines so far.
        prompts: The number of validation prompts; 0 if it is not known, and there is no interval.
    """
    if not lines or not (rates := validations(lines[:1])):
        return []
    rate = rates[0][1]
    is_share = "eval/accuracy" in lines[0] and 0 <= rate <= 1
    return [rate, *wilson(round(rate * prompts), prompts)] if prompts and is_share else [rate]


def validations(lines: Iterable[Line]) -> list[tuple[int, float]]:
    """Return the step and the accuracy, or else the reward, of each validation."""
    pairs = [(line, line.get("eval/accuracy", line.get("eval/reward"))) for line in lines]
    return [(int(line["step"]), value) for line, value in pairs if value is not None]


def sentence(
    lines: Sequence[Line], alerts: Sequence[Mapping[str, Any]], base: Sequence[float], is_over: bool
) -> tuple[str, str]:
    """Return the gravity ("stop", "warning", "good" or "") and the sentence about a training.

    Args:
        lines: Finite numbers of the lines of metrics.jsonl.
        alerts: The alerts so far, with "step".
        base: The result of `before_training`.
        is_over: Whether training has ended.

    >>> line = {"eval/accuracy": 1.0}
    >>> sentence([{"step": 25, **line}, {"step": 50, **line}], [], [], False)
    ('good', 'solved: the validation is at 100% since step 25: stop?')
    """
    newest = {alert["state"]: alert for alert in alerts}
    if "stop" in newest:
        return "stop", _alert(newest["stop"])
    shares = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    solved = list(takewhile(lambda pair: pair[1] >= SOLVED, reversed(shares)))
    if solved and solved[0][0]:
        since = f"solved: the validation is at {solved[0][1]:.0%} since step {solved[-1][0]}"
        return "good", since + ("" if is_over else ": stop?")
    if newest:
        return "warning", _alert(next(reversed(newest.values())))
    silent = [line["frac_reward_zero_std"] for line in lines if "frac_reward_zero_std" in line]
    if len(silent) >= FEW and fmean(silent[-FEW:]) >= SILENT:
        return "warning", "hardly any group has a signal: its completions all earn the same"
    return _change(lines, base)


def _alert(alert: Mapping[str, Any]) -> str:
    return f"{alert['name']}, step {alert['step']}: {alert['evidence']}. {alert['fix']}"


def _change(lines: Sequence[Line], base: Sequence[float]) -> tuple[str, str]:
    """Say whether validation, or else the reward, has left the place where it began."""
    rates = validations(lines)
    if len(base) == 3 and len(rates) > 1:
        before, low, high = base
        now = f"{before:.0%} before training, {rates[-1][1]:.0%} at step {rates[-1][0]}"
        if rates[-1][1] > high:
            return "good", f"it learns: validation {now}"
        if rates[-1][1] < low:
            return "warning", f"it gets worse: validation {now}"
    rewards = [line["reward"] for line in lines if "reward" in line]
    part = len(rewards) // 4
    if part < FEW:
        return "", "too early to tell"
    first, last = rewards[:part], rewards[-part:]
    errors = [math.dist(values, [fmean(values)] * part) / part for values in (first, last)]
    gain, change = fmean(last) - fmean(first), f"{fmean(first):.3g} at first, {fmean(last):.3g} now"
    if abs(gain) > 2 * math.hypot(*errors):
        return ("good", f"the reward rises: {change}") if gain > 0 else ("", f"it falls: {change}")
    return "", f"the reward has not moved beyond its noise: {change}"


def one_group(step: int, completions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the prompt of a step whose completions earn the most different totals.

    Args:
        step: The step.
        completions: As in `Update`.

    Returns:
        step, question, the number of completions, and at most SHOWN of them, best first; each has
        text, total, advantage, and the scores of the rewards.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in completions:
        groups.setdefault(str(one["question"]), []).append(one)
    totals = {key: [_number(one["reward"]) or 0.0 for one in g] for key, g in groups.items()}
    question = max(groups, key=lambda key: max(totals[key]) - min(totals[key]))
    group = sorted(groups[question], key=lambda one: -(_number(one["reward"]) or 0.0))
    last = len(group) - 1
    places = range(len(group)) if last < SHOWN else [last * n // (SHOWN - 1) for n in range(SHOWN)]
    return {
        **{"step": step, "question": _cut(question), "count": len(group)},
        "completions": [
            {
                "text": _cut(str(group[place]["completion"])),
                "total": _number(group[place]["reward"]),
                "advantage": _number(group[place].get("advantage")),
                "scores": {
                    name: _number(value)
                    for name, value in group[place].items()
                    if name not in TEXTS and (value is None or isinstance(value, int | float))
                },
            }
            for place in places
        ],
    }


def _number(value: Any) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _cut(text: str) -> str:
    return text if len(text) <= CHARACTERS else f"{text[: CHARACTERS - 1]}…"
