"""Raise alerts from the metrics of a training run, each with a cause, evidence and a remedy.

No limit is an absolute reward or gradient norm: a window of steps is compared with the run's own
past, its noise, and the range of its rewards. A window holds enough completions to tell, so it is
longer where a step has few. The same alert is raised again only after a window without its cause.
"""

import math
import re
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.training.rules import EXACT, PARTS, is_number

# The texts of each alert, and its limits.
ALERTS = read_yaml(Path(__file__).with_name("alerts.yaml"))
LIMITS = SimpleNamespace(**read_yaml(Path(__file__).with_name("alert_limits.yaml")))
PAGE = "docs/troubleshooting.md"


def section(name: str) -> str:
    """Return the address of the handbook's section on an alert or a check.

    >>> section("format learnt, correctness flat")
    'docs/troubleshooting.md#format-learnt-correctness-flat'
    """
    return f"{PAGE}#{re.sub(r'[^a-z]+', '-', name.lower())}"


class Expected(NamedTuple):
    """Hold the facts about a training run that are known before its first step.

    rewards: {name: (weight, lowest score, highest score)}.
    completions: Number of completions scored in a step.
    eval_rows: Number of prompts of the validation split.
    max_steps: Number of training steps.
    correct: The reward that decides what is right; by default the first one, "" if it is not known.
    logging_steps: Number of steps of which a line holds the means.
    max_completion_length: The cap of completions [tokens]; 0 if it is not known.
    """

    rewards: dict[str, tuple[float, float, float]]
    completions: int = 64
    eval_rows: int = 64
    max_steps: int = 0
    correct: str | None = None
    logging_steps: int = 1
    max_completion_length: int = 0


class Watch:
    """Raise alerts from training metrics, which `feed` takes one logged line at a time."""

    def __init__(self, expected: Expected) -> None:
        self.expected, self.limits = expected, LIMITS
        self.lines, self.evals, self._held = [], [], {}
        first = next(iter(expected.rewards), "")
        self.correct = first if expected.correct is None else expected.correct
        self.each = max(1, expected.completions) * max(1, expected.logging_steps)  # of a line
        # A line that is the mean of several steps counts as these steps; three show a spread.
        least = max(3, LIMITS.window // max(1, expected.logging_steps))
        self.window = max(least, math.ceil(LIMITS.completions / self.each))
        self.patience = self.window * LIMITS.patience // LIMITS.window

    def widen(self, name: str, values: Iterable[Any]) -> None:
        """Let the range of a reward hold these scores; what is no number is left out."""
        weight, *ends = self.expected.rewards[name]
        ends += [float(value) for value in values if is_number(value)]
        self.expected.rewards[name] = (weight, min(ends), max(ends))

    def feed(self, line: dict[str, Any]) -> list[Check]:
        """Take one line of metrics, and return the alerts that it raises.

        The line is given held-out accuracy, where it has it as a mean of the correct reward.
        """
        if self.correct and (key := f"eval/rewards/{self.correct}/mean") in line:
            line.setdefault("eval/accuracy", line[key])
        if is_number(line.get("eval/accuracy")):
            self.evals.append((len(self.lines), line))
        self.lines += [line] if "reward" in line else []
        new, now = [], len(self.lines)
        for rule, about, evidence in chain(*(part(self) for part in PARTS)):
            if now - self._held.get((rule, about), -math.inf) > self.window:
                new.append(self.alert(rule, about, evidence, line.get("step") or now))
            self._held[rule, about] = now
        return new

    def alert(self, rule: str, about: str, evidence: str, step: int) -> Check:
        """Return an alert with its cause, its evidence, and its remedy."""
        cause, fix = (ALERTS[rule][part].format(about) for part in ("cause", "fix"))
        sentence = f"step {step}: {cause} ({evidence})"
        grave = "grave" in ALERTS[rule] and about != EXACT
        fix += f"; see {section(rule)}"
        return Check(rule, "stop" if grave else "warning", sentence, fix)

    def holding(self) -> set[str]:
        """Return the rules whose conditions were met within the last window of lines."""
        now = len(self.lines)
        return {rule for (rule, _), at in self._held.items() if now - at <= self.window}

    def is_scheduled(self) -> bool:
        """Return whether a reward's weight changes, so that a fall of the total means little."""
        return any(self.last(f"{name}/factor") for name in self.expected.rewards)

    def last(self, key: str, ago: int = 0, count: int = 0) -> list[float]:
        """Return a metric's values in the window that ended `ago` lines ago; [] if incomplete."""
        start = len(self.lines) - ago - (count or self.window)
        lines = self.lines[start : len(self.lines) - ago] if start >= 0 else []
        return [line[key] for line in lines if is_number(line.get(key))]

    def mean(self, key: str, ago: int = 0, count: int = 0) -> float:
        """Return a metric's mean in the window that ended `ago` lines ago; NaN without values."""
        return fmean(self.last(key, ago, count) or [math.nan])

    def least(self, key: str, steps: int = 0) -> float:
        """Return a share that the last window exceeds beyond chance: two standard errors less.

        Args:
            key: A share, of the completions or of something else.
            steps: How many independent parts the window has; by default its completions.
        """
        share = self.mean(key)
        return share - 2 * math.sqrt(abs(share * (1 - share)) / (steps or self.each * self.window))

    def many(self) -> int:
        """Return how many lines hold enough completions to say that the reward does not rise."""
        return max(self.window, -(-self.limits.enough // 6 // self.each))

    def rise(self, key: str, ago: int, count: int = 0, until: int = 0) -> tuple[float, float]:
        """Return how a window's mean rose from `ago` to `until` lines ago, and the standard error.

        Equal values do not prove that there is no noise: of n completions that all failed, one in n
        might have passed.
        """
        then, now = self.last(key, ago, count), self.last(key, until, count)
        if min(len(then), len(now)) < 2:
            return math.nan, math.nan  # every comparison with NaN is false
        errors = [math.dist(v, [fmean(v)] * len(v)) / (len(v) - 1) for v in (then, now)]
        least = self.spread(key) / (self.each * min(len(then), len(now)))
        return fmean(now) - fmean(then), math.hypot(*errors, least) + 1e-9

    def sure(self, key: str, ago: int, count: int = 0, until: int = 0) -> float:
        """Return the `rise` of a window's mean, divided by its standard error."""
        rise, error = self.rise(key, ago, count, until)
        return rise / error

    def noise(self, ago: int, count: int) -> float:
        """Return the standard error of the mean reward in the `count` lines before `ago`.

        It is that of its completions; those of a group are alike, so they count as half as many.
        """
        each = self.mean("reward_std", ago, count)
        if not is_number(each):
            values = self.last("reward", ago, count) or [math.nan]
            each = math.dist(values, [fmean(values)] * len(values)) * math.sqrt(self.each / count)
        size = self.each * count
        return max(each * math.sqrt(2 / size), self.spread("reward") / size)

    def spread(self, key: str) -> float:
        """Return the range of what one completion adds to a metric; 0 if it is not known."""
        if key == "reward":
            low, full = self.ends()
            return full - low
        if key in ("frac_reward_zero_std", "completions/clipped_ratio"):
            return 1.0
        name = key.removeprefix("rewards/").removesuffix("/mean")
        _, low, high = self.expected.rewards.get(name, (0, 0, 0))
        return (high - low) if key == f"rewards/{name}/mean" else 0.0

    def best(self, key: str, count: int) -> tuple[float, int]:
        """Return the highest mean of a metric in `count` lines side by side, and how long ago."""
        places = range(0, len(self.lines) - count + 1, count)
        return max(((self.mean(key, ago, count), ago) for ago in places), default=(math.nan, 0))

    def flat(self, key: str, full: float) -> str:
        """Return evidence that a curve has never risen; "" if it has, or if noise may hide it.

        Nothing is said before `enough` completions: many a reward takes off late. Its slope, noise
        included, has to be too small to gain a share `flat` of what is left in the whole run.
        """
        if len(self.lines) * self.each < self.limits.enough:
            return ""
        first = len(self.lines) - self.window
        then, later = self.last(key, first), self.last(key, 0, first)
        high, ago = self.best(key, self.window)
        if high > self.mean(key, first) and ago < first and self.sure(key, first, until=ago) > 2:
            return ""
        error = stdev(later) / math.sqrt(len(then)) if then and len(later) > 1 else math.nan
        if fmean(later or [0]) - fmean(then or [0]) > 2 * error:  # windows of few lines say less
            return ""
        whole = (self.expected.max_steps or self.limits.usual) / self.expected.logging_steps
        whole = max(whole, len(self.lines))
        for span in (self.patience << double for double in range(12)):
            rise, error = self.rise(key, span // 2, span // 2)
            least = self.limits.flat * (full - self.mean(key)) * (span // 2) / whole
            if rise <= 2 * error and rise + 2 * error < least:
                steps = span * self.expected.logging_steps
                return f"{self.mean(key):.3f}, {rise:+.3f} ± {2 * error:.3f} in {steps} steps"
        return ""

    def ends(self) -> list[float]:
        """Return the lowest and the highest possible weighted total."""
        ranges = self.expected.rewards.values()
        return [sum(pick(v * a, v * b) for v, a, b in ranges) for pick in (min, max)]

    def success(self, name: str) -> float:
        """Return the share of a reward's range that the last window earns on average.

        Args:
            name: The reward; "" for the weighted total.
        """
        if not name:
            low, high = self.ends()
            return (self.mean("reward") - low) / ((high - low) or 1)
        _, low, high = self.expected.rewards[name]
        factor = fmean(self.last(f"{name}/factor") or [1]) or 1  # of a scheduled reward
        return (self.mean(f"rewards/{name}/mean") / factor - low) / ((high - low) or 1)


def learning_alerts() -> set[str]:
    """Return the names of the alerts that are not for a placebo, which is not meant to learn."""
    return {name for name, texts in ALERTS.items() if "placebo" not in texts}


def summary(alerts: Iterable[Check]) -> str:
    """Return the alerts as text, one per line."""
    lines = (f"{alert.state}: {alert.name}, {alert.evidence} → {alert.fix}" for alert in alerts)
    return "\n".join(lines) or "no alerts"


def checks(watch: Watch, alerts: Sequence[Check]) -> list[Check]:
    """Return the checks that stage 03 records once training has ended.

    Args:
        watch: The watch that was fed with the run's lines.
        alerts: Every alert of the run.
    """
    rules = watch.holding()
    live = list({alert.fix: alert for alert in alerts if alert.name in rules}.values())
    count = f"{len(alerts)} during training, {len(live)} of them still active at the end"
    if not live:
        return [reward_rises(watch), Check("alerts", "ok", count)]
    state = "stop" if "stop" in {alert.state for alert in live} else "warning"
    fix = "follow the advice of the last one"
    return [reward_rises(watch), Check("alerts", state, f"{count}: {summary(live)}", fix)]


def reward_rises(watch: Watch) -> Check:
    """Check that the reward rises from the first half of the steps to the second half."""
    lines, half = len(watch.lines), len(watch.lines) // 2
    rise, error = watch.rise("reward", lines - half, half)
    count = lines * watch.each
    change = f"{rise:+.3g} ± {2 * error:.2g} between halves of {count:,} completions"
    if math.isnan(rise):
        change = f"{lines} steps are too few"
    if lines >= watch.window and rise > 2 * error:
        return Check("reward rises", "ok", change)
    missing = watch.limits.enough - count
    if missing > 0:
        more = math.ceil(missing / max(1, watch.expected.completions))
        change += f"; {more} more steps would tell"
    return Check("reward rises", "warning", change, f"train longer, or see {PAGE}")
