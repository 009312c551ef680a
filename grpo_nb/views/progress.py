"""Say where a training stands in one sentence, and choose what a dashboard shows of a step."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple

from grpo_nb.checks import Check
from grpo_nb.stats import wilson
from grpo_nb.views.tables import cut

SOLVED = 0.98  # share of right answers in validation from which more training is a waste of time
START = 10  # steps, at least, whose mean is a curve at first
SHOWN = 8  # completions of a group
CHARACTERS = 1_500  # of a completion, or of a question
TEXTS = {"question", "completion", "reward", "advantage", "images"}
Line = Mapping[str, float]


class Update(NamedTuple):
    """Describe a step or a validation to a watcher.

    line: The line of metrics.jsonl. After a step, its keys are TRL's (reward,
        rewards/<name>/mean and /std, frac_reward_zero_std, completions/mean_length and
        /clipped_ratio, entropy, kl, clip_ratio/…, grad_norm, learning_rate, step_time), "step",
        and with a run's trainer seconds/generation, seconds/reward, seconds/update,
        tokens_per_second, memory_gib and groups/distinct.
        After a validation, the keys are "step", eval/reward, eval/accuracy (if a reward is known to
        say what is right), and with a run's trainer eval/exact, eval/format and eval/seconds.
    total_steps: The number of steps of the training.
    completions: The completions of this step, one dict each: question, completion, each reward,
        reward (the weighted total) and advantage; empty after a validation.
    alerts: The new alerts; the state of a serious one is "stop".
    """

    line: dict[str, Any]
    total_steps: int
    completions: Sequence[dict[str, Any]]
    alerts: Sequence[Check]


Watcher = Callable[[Update], None]


def before_training(lines: Sequence[Line], prompts: int) -> list[float]:
    """Return the first validation and its 95 % interval; [] if the first step had none.

    Args:
        lines: The lines so far.
        prompts: The number of validation prompts; 0 if it is not known, and there is no interval.
    """
    first = lines[0] if lines else {}
    if (share := first.get("eval/accuracy")) is not None:
        return [share, *wilson(round(share * prompts), prompts)] if prompts else [share]
    return [first["eval/reward"]] if "eval/reward" in first else []


def sentence(
    lines: Sequence[Line],
    alerts: Sequence[Mapping[str, Any]],
    base: Sequence[float],
    total_steps: int,
    correct: str = "",
) -> tuple[str, str]:
    """Return the gravity ("stop", "warning", "good" or "") and the sentence about a training.

    Args:
        lines: Finite numbers of the lines of metrics.jsonl.
        alerts: The alerts so far, with "state" and "text" (see `alert_text`).
        base: The result of `before_training`.
        total_steps: The number of steps of the training.
        correct: The name of the reward that says what is right; "" if it is not known.

    >>> line = {"eval/accuracy": 1.0}
    >>> sentence([{"step": 25, **line}, {"step": 50, **line}], [], [], 99)
    ('good', 'solved: the validation is at 100% since step 25')
    """
    newest = {alert["state"]: alert["text"] for alert in alerts}
    if "stop" in newest:
        return "stop", newest["stop"]
    shares = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    solved = list(takewhile(lambda pair: pair[1] >= SOLVED, reversed(shares)))
    if solved and solved[0][0]:
        since = f"solved: the validation is at {solved[0][1]:.0%} since step {solved[-1][0]}"
        return "good", since
    if newest:
        return "warning", next(reversed(newest.values()))
    if len(base) == 3 and len(shares) > 1:
        (before, low, high), (step, share) = base, shares[-1]
        figures = f"validation {before:.0%} before training, {share:.0%} at step {step}"
        if share > high:
            return "good", f"it learns: {figures}"
        if share < low:
            return "warning", f"it gets worse: {figures}"
    return "", _means(lines, total_steps, correct)


def alert_text(name: str, evidence: str, fix: str) -> str:
    """Return an alert in one sentence.

    >>> alert_text("spike", "step 9: kl is high (5)", "wait")
    'spike, step 9: kl is high (5) → wait'
    """
    return f"{name}, {evidence} → {fix}"


def _means(lines: Sequence[Line], total_steps: int, correct: str) -> str:
    """Return the means of the reward, and of the one that says what is right, at first and now."""
    # The first part of the training stays the same while it goes on.
    steps, part = [line for line in lines if "reward" in line], max(START, total_steps // 10)
    if len(steps) < 2 * part:
        return "too early to tell"
    texts = []
    for name, key in (("the reward", "reward"), (f"`{correct}`", f"rewards/{correct}/mean")):
        ends = [[line[key] for line in of if key in line] for of in (steps[:part], steps[-part:])]
        if all(ends):
            texts.append(f"{name} {fmean(ends[0]):.3g} → {fmean(ends[1]):.3g}")
    return f"{', '.join(texts)} (means of the first and the last {part} steps)"


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
    for one in sorted(completions, key=lambda one: -(_number(one["reward"]) or 0.0)):
        groups.setdefault(str(one["question"]), []).append(one)
    totals = {key: [_number(one["reward"]) or 0.0 for one in g] for key, g in groups.items()}
    group = groups[max(groups, key=lambda key: totals[key][0] - totals[key][-1])]
    half = SHOWN // 2
    some = group if len(group) <= SHOWN else [*group[:half], *group[-half:]]
    return {
        **{"step": step, "question": cut(str(group[0]["question"]), CHARACTERS)},
        **{"count": len(group), "completions": list(map(_shown, some))},
    }


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    scores = {
        name: _number(value)
        for name, value in one.items()
        if name not in TEXTS and (value is None or isinstance(value, int | float))
    }
    total, advantage = _number(one["reward"]), _number(one.get("advantage"))
    text = cut(str(one["completion"]), CHARACTERS)
    return {"text": text, "total": total, "advantage": advantage, "scores": scores}


def _number(value: Any) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
