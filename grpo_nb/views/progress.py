"""Say where a training stands in one sentence, and choose what a dashboard shows of a step."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any

from grpo_nb.stats import wilson
from grpo_nb.views.tables import cut

SOLVED = 0.98  # share of right answers in validation from which more training is a waste of time
SILENT = 0.9  # share of groups without a signal, mean over FEW steps, that is worth a warning
FEW = 5  # steps of such a mean
START = 10  # steps, at least, whose mean is the reward at first
UNKNOWN = "whether answers are right is unknown: Monitor(trainer, correct=…)"
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
    lines: Sequence[Line],
    alerts: Sequence[Mapping[str, Any]],
    base: Sequence[float],
    total_steps: int,
    is_over: bool = False,
    correct: str = "",
) -> tuple[str, str]:
    """Return the gravity ("stop", "warning", "good" or "") and the sentence about a training.

    Args:
        lines: Finite numbers of the lines of metrics.jsonl.
        alerts: The alerts so far, with "state" and "text" (see `alert_text`).
        base: The result of `before_training`.
        total_steps: The number of steps of the training.
        is_over: Whether training has ended.
        correct: The name of the reward that says what is right; "" if it is not known.

    >>> line = {"eval/accuracy": 1.0}
    >>> sentence([{"step": 25, **line}, {"step": 50, **line}], [], [], 99)
    ('good', 'solved: the validation is at 100% since step 25: stop?')
    """
    newest = {alert["state"]: alert["text"] for alert in alerts}
    if "stop" in newest:
        return "stop", newest["stop"]
    shares = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    solved = list(takewhile(lambda pair: pair[1] >= SOLVED, reversed(shares)))
    if solved and solved[0][0]:
        since = f"solved: the validation is at {solved[0][1]:.0%} since step {solved[-1][0]}"
        return "good", since + ("" if is_over else ": stop?")
    if newest:
        return "warning", next(reversed(newest.values()))
    silent = [line["frac_reward_zero_std"] for line in lines if "frac_reward_zero_std" in line]
    if len(silent) >= FEW and fmean(silent[-FEW:]) >= SILENT:
        return "warning", "hardly any group has a signal: its completions all earn the same"
    return _validated(shares, base) or _change(lines, shares, total_steps, correct)


def alert_text(name: str, evidence: str, fix: str) -> str:
    """Return an alert in one sentence.

    >>> alert_text("spike", "step 9: kl is high (5)", "wait")
    'spike, step 9: kl is high (5) → wait'
    """
    return f"{name}, {evidence} → {fix}"


def _validated(
    shares: Sequence[tuple[int, float]], base: Sequence[float]
) -> tuple[str, str] | None:
    """Say whether the validation has left the interval in which it began; None if it has not."""
    if len(base) < 3 or len(shares) < 2:
        return None
    (before, low, high), (step, share) = base, shares[-1]
    now = f"{before:.0%} before training, {share:.0%} at step {step}"
    if share > high:
        return "good", f"it learns: validation {now}"
    return ("warning", f"it gets worse: validation {now}") if share < low else None


def _change(
    lines: Sequence[Line], shares: Sequence[tuple[int, float]], total_steps: int, correct: str
) -> tuple[str, str]:
    """Say whether the reward, and the one that says what is right, have left their beginnings."""
    # The first part of the training stays the same while it goes on.
    steps, part = [line for line in lines if "reward" in line], max(START, total_steps // 10)
    if len(steps) < 2 * part:
        return "", "too early to tell"
    ends = steps[:part], steps[-part:]
    names = [match[1] for key in steps[-1] if (match := re.fullmatch("rewards/(.*)/mean", key))]
    names += [correct] if correct and correct not in names else []
    rises = {name: _rise(*ends, f"rewards/{name}/mean", f"{name}/factor") for name in names}
    total, figures = _rise(*ends, "reward")
    rising = ", ".join(f"`{name}`" for name in names if rises[name][0] > 0)
    text = {1: "the reward rises" + (f" with {rising}" if rising else ""), -1: "the reward falls"}
    text = f"{text.get(total, 'the reward has not moved beyond its noise')}: {figures}"
    means = f"(means of the first and the last {part} steps)"
    if correct:
        right, figures = rises[correct]
        count = ("no more", "more", "fewer")[right]
        text = f"{count} answers are right: `{correct}` {figures}; {text} {means}"
        return ("", "good", "warning")[right], text
    if shares:
        validation = f"validation {shares[0][1]:.0%} at first, {shares[-1][1]:.0%} now"
        return "", f"{text} {means}; {validation}"
    return "", f"{text} {means}" + (f"; {UNKNOWN}" if total > 0 else "")


def _rise(
    first: Sequence[Line], last: Sequence[Line], key: str, factor: str = ""
) -> tuple[int, str]:
    """Return 1 if a curve rose beyond its noise, -1 if it fell, else 0; and its two means.

    Args:
        first: Lines of the beginning.
        last: The latest lines.
        key: The curve.
        factor: The curve of the factor by which the reward is scheduled.
    """
    parts = [[x[key] / (x.get(factor) or 1) for x in part if key in x] for part in (first, last)]
    if not all(parts):
        return 0, "without scores"
    means = [fmean(values) for values in parts]
    errors = [math.dist(v, [m] * len(v)) / len(v) for v, m in zip(parts, means, strict=True)]
    gain, noise = means[1] - means[0], 2 * math.hypot(*errors)
    return (gain > noise) - (gain < -noise), f"{means[0]:.3g} → {means[1]:.3g}"


def ending(
    step: int, total_steps: int, goes_on: str, error: BaseException | None = None, reason: str = ""
) -> str:
    """Say what ended a training, and how it goes on.

    Args:
        step: The last step that was trained.
        total_steps: The number of steps of the training.
        goes_on: How it goes on, or what is kept of a finished one.
        error: The error or interrupt that ended it.
        reason: What else ended it before its last step.

    >>> ending(60, 60, "")
    'finished after step 60'
    >>> ending(7, 60, "trainer.train() goes on", KeyError("answer"))
    "ended by an error after step 7: KeyError: 'answer'; trainer.train() goes on"
    """
    if isinstance(error, KeyboardInterrupt):
        reason = "stopped by you"
    elif error is not None:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        return f"ended by an error after step {step}: {what}; {goes_on}"
    elif step >= total_steps:
        return f"finished after step {step}" + f"; {goes_on}" * bool(goes_on)
    return f"{reason or 'ended before its last step,'} after step {step}; {goes_on}"


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
        **{"step": step, "question": cut(question, CHARACTERS), "count": len(group)},
        "completions": [
            {
                "text": cut(str(group[place]["completion"]), CHARACTERS),
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
