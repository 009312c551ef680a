"""Raise alerts from the metrics of a training run, each with a cause, evidence and a remedy.

No alert depends on an absolute reward or gradient norm alone: a window of steps is compared with
the run's own past, its noise, and the range of its rewards. A window holds enough completions to
tell, so it is longer if a step has few completions. An alert that was raised is raised again only
after a window without its cause.

A rule reads a `Watch`, and yields (alert, what it is about, evidence). A metric that a run does not
log is NaN in the `Watch`; every comparison with NaN is false, so the metric's rules are silent.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml

# The texts of each alert, and its limits.
ALERTS = read_yaml(Path(__file__).with_name("alerts.yaml"))
LIMITS = SimpleNamespace(**read_yaml(Path(__file__).with_name("alert_limits.yaml")))
PAGE = "docs/troubleshooting.md"
Alarms = Iterator[tuple[str, str, str]]

# TRL's name for how far vLLM's log-probabilities are from the policy's [nats per token].
DIFFERENCE = "sampling/sampling_logp_difference/mean"
LENGTH, CUT = "completions/mean_length", "completions/clipped_ratio"
SILENT = "frac_reward_zero_std"
GROUP = 16  # completions, at most, in most groups
OFTEN = 3  # steps that have the highest mean of all

# If one of these held-out figures falls and the reward does not, the policy hacks the rewards. The
# second figure does not depend on the rewards: pleas may persuade a judge to accept other answers.
EXACT = "fewer answers are the reference"  # they may be right in other words: a reader decides
HELD_OUT = {"eval/accuracy": "held-out accuracy falls", "eval/exact": EXACT}
# Metrics without which some rules are silent.
NEEDS = (LENGTH, CUT, SILENT, "grad_norm", "kl", "entropy", DIFFERENCE, "eval/accuracy")


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
    correct: The reward that decides what is right; None for the first one, "" if it is not known.
    logging_steps: Number of steps whose means one line holds.
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
        self._columns: dict[str, list[float | None]] = {}  # of the lines, where they are numbers
        self.most: dict[str, float] = {}  # the highest scores that were seen
        self.settled: set[str] = set()  # rewards that pay no more
        first = next(iter(expected.rewards), "")
        self.correct = first if expected.correct is None else expected.correct
        self.each = max(1, expected.completions) * max(1, expected.logging_steps)  # of a line
        # A line that is the mean of several steps counts as these steps; three show a spread.
        least = max(3, LIMITS.window // max(1, expected.logging_steps))
        self.window = max(least, math.ceil(LIMITS.completions / self.each))
        self.patience = self.window * LIMITS.patience // LIMITS.window

    def widen(self, name: str, values: Iterable[Any]) -> None:
        """Update a reward's range to include these scores; skip values that are not numbers."""
        weight, *ends = self.expected.rewards[name]
        scores = [float(value) for value in values if is_number(value)]
        self.most[name] = max([*scores, self.most.get(name, -math.inf)])
        self.expected.rewards[name] = (weight, min(ends + scores), max(ends + scores))

    def settle(self, name: str, means: Iterable[Any]) -> None:
        """Set the upper end of a reward's range, if none was declared, to the highest score paid.

        This is done only if several steps have this score as their mean, and others have a lower
        mean: then all completions of those several steps seem to have earned the full score. After
        too few steps, the range is left as it is.

        Args:
            name: The reward.
            means: The reward's mean in each step.
        """
        weight, low, high = self.expected.rewards[name]
        values = [float(value) for value in means if is_number(value)]
        top, is_enough = self.most.get(name, 0), len(values) * self.each >= self.limits.enough / 5
        is_often = values.count(top) >= max(OFTEN, len(values) / 20)
        if is_enough and is_often and min(values) < top and 0 < top < high:
            self.expected.rewards[name] = (weight, low, top)
            self.settled.add(name)

    def feed(self, line: dict[str, Any]) -> list[Check]:
        """Take one line of metrics, and return the alerts that it raises.

        If the line lacks eval/accuracy, the evaluation mean of the reward `self.correct`, as a
        share of its range, is used instead.
        """
        if self.correct and is_number(mean := line.get(f"eval/rewards/{self.correct}/mean")):
            _, low, high = self.expected.rewards[self.correct]
            line.setdefault("eval/accuracy", (mean - low) / ((high - low) or 1))
        if is_number(line.get("eval/accuracy")):
            self.evals.append((len(self.lines), line))
        self.lines += [line] if "reward" in line else []
        new, now = [], len(self.lines)
        for rule, about, evidence in chain(*(rules(self) for rules in RULES)):
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

    def held(self) -> dict[str, int]:
        """Return {rule: the number of lines after which its condition was last met}."""
        by_line = sorted(self._held.items(), key=lambda pair: pair[1])
        return {rule: at for (rule, _), at in by_line}

    def holding(self) -> set[str]:
        """Return the rules whose conditions were met within the last window of lines."""
        return {rule for rule, at in self.held().items() if len(self.lines) - at <= self.window}

    def is_scheduled(self) -> bool:
        """Return whether a reward's weight changes, so that a fall of the total means little."""
        return any(self.last(f"{name}/factor") for name in self.expected.rewards)

    def last(self, key: str, ago: int = 0, count: int = 0) -> list[float]:
        """Return a metric's values in the window that ended `ago` lines ago.

        The result is [] if there are not enough lines. The window has `count` lines, or by default
        `self.window`.
        """
        start = len(self.lines) - ago - (count or self.window)
        column = self._columns.setdefault(key, [])
        for line in self.lines[len(column) :]:
            column.append(line[key] if is_number(line.get(key)) else None)
        values = column[start : len(self.lines) - ago] if start >= 0 else []
        return [value for value in values if value is not None]

    def mean(self, key: str, ago: int = 0, count: int = 0) -> float:
        """Return a metric's mean in the window that ended `ago` lines ago; NaN without values."""
        return fmean(self.last(key, ago, count) or [math.nan])

    def least(self, key: str, steps: int = 0) -> float:
        """Return a lower bound of a share: its mean in the last window less two standard errors.

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
        """Return how much a mean rose from one window to a later one, and its standard error.

        The windows have `count` lines; the first ended `ago` lines ago, the second `until` lines
        ago. Equal values may be noisy, too: if all n completions failed, the pass rate may still be
        1/n.
        """
        then, now = self.last(key, ago, count), self.last(key, until, count)
        if min(len(then), len(now)) < 2:
            return math.nan, math.nan  # every comparison with NaN is false
        errors = [math.dist(v, [fmean(v)] * len(v)) / (len(v) - 1) for v in (then, now)]
        least = self.spread(key) / (self.each * min(len(then), len(now)))
        return fmean(now) - fmean(then), math.hypot(*errors, least) + 1e-9

    def rise_of_halves(self) -> tuple[float, float]:
        """Return how much the reward rose from the first half to the second, and the error."""
        half = len(self.lines) // 2
        return self.rise("reward", len(self.lines) - half, half)

    def sure(self, key: str, ago: int, count: int = 0, until: int = 0) -> float:
        """Return a metric's rise divided by the rise's standard error; see `rise`."""
        rise, error = self.rise(key, ago, count, until)
        return rise / error

    def noise(self, ago: int, count: int) -> float:
        """Return the standard error of the mean reward in `count` lines that ended `ago` lines ago.

        It is the larger of two estimates, and at least the effect of one completion. The first
        estimate is from the spread of single completions; two of them count as one, because the
        completions of a group are alike. The second is from the differences between successive
        steps, and is larger if prompts differ much; a trend hardly affects it.
        """
        changes = [late - early for early, late in pairwise(self.last("reward", ago, count))]
        between = math.sqrt(fmean([change**2 for change in changes] or [0]) / 2 / count)
        each = self.mean("reward_std", ago, count)
        if not is_number(each):
            values = self.last("reward", ago, count) or [math.nan]
            each = math.dist(values, [fmean(values)] * len(values)) * math.sqrt(self.each / count)
        size = self.each * count
        return max(between, each * math.sqrt(2 / size), self.spread("reward") / size)

    def spread(self, key: str) -> float:
        """Return the range of a metric's values for a single completion; 0 if it is not known."""
        if key == "reward":
            low, full = self.ends()
            return full - low
        if key in ("frac_reward_zero_std", "completions/clipped_ratio"):
            return 1.0
        name = key.removeprefix("rewards/").removesuffix("/mean")
        _, low, high = self.expected.rewards.get(name, (0, 0, 0))
        return (high - low) if key == f"rewards/{name}/mean" else 0.0

    def best(self, key: str, count: int) -> tuple[float, int]:
        """Return (highest mean of a metric in `count` successive lines, how many lines ago)."""
        places = range(0, len(self.lines) - count + 1, count)
        return max(((self.mean(key, ago, count), ago) for ago in places), default=(math.nan, 0))

    def flat(self, key: str, full: float) -> str:
        """Return evidence that a curve has never risen; "" if it has, or if noise may hide it.

        The result is "" before `enough` completions, because many rewards begin to rise late. A
        curve has not risen if, at its slope plus noise, the whole run would gain less than a small
        share (`limits.flat`) of the distance to `full`.
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
            if rise <= 2 * error and rise + self.limits.stuck * error < least:
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


def is_number(value: object) -> bool:
    """Return whether a value of a log is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


# -- the rules


def steps(w: Watch) -> Alarms:
    """Yield alerts on values that are not numbers, on spikes, and on lengths of completions."""
    now, limits = (w.lines or [{}])[-1], w.limits
    for key in ("loss", "reward", *(f"rewards/{name}/mean" for name in w.expected.rewards)):
        if key in now and not is_number(now[key]):
            yield "not a number", key, f"{key} is {now[key]}"
    for key in ("grad_norm", "kl"):
        lost = [line[key] for line in w.lines[-w.window :] if not is_number(line.get(key, 0))]
        if len(lost) > 1:  # fp16 skips a step now and then
            yield "not a number", key, f"{key} is {lost[-1]} in {len(lost)} of {w.window} lines"
        past = [v for v in w.last(key, 2, min(w.patience, len(w.lines) - 2)) if v > 0]
        peaks = w.last(key, 0, 2)  # a spike of a single step is common and harmless
        least = limits.kl if key == "kl" else limits.norm
        is_high = len(peaks) == 2 and len(past) >= 2 * w.window and min(peaks) > least
        if is_high and min(peaks) > limits.spike * max(past):
            yield "spike", key, f"{peaks[0]:.3g} and {peaks[1]:.3g}, at most {max(past):.3g} before"
    worst, usual = max(w.last("kl", 0, w.window), default=0), median(w.last("kl") or [math.nan])
    is_lone = len(w.lines) > 2 * w.window and worst > max(limits.kl, limits.kl_peak * usual)
    if worst > limits.kl_spike or is_lone:
        yield "spike", "kl", f"{worst:.3g} nats a token; usual {usual:.2g}"
    yield from _truncated(w)
    count = w.many()
    for ago in (max(w.patience, count), len(w.lines) - count):
        before, after = w.mean(LENGTH, ago, count), w.mean(LENGTH, 0, count)
        rise, error = w.rise("reward", ago, count)
        earns = rise > 2 * error or rise + 2 * error > limits.gain * w.spread("reward")
        if after > limits.longer * before and w.sure(LENGTH, ago, count) > 2 and not earns:
            yield "length creep", "", f"{before:.0f} → {after:.0f} tokens in {ago} steps"


def _truncated(w: Watch) -> Alarms:
    """Yield an alert if many completions are truncated, and their share does not fall."""
    cap = w.expected.max_completion_length
    half = max(2, w.window // 2)
    if w.least(CUT) > w.limits.truncated and w.sure(CUT, half, half) > -2:
        yield "truncation", "", f"{w.mean(CUT):.0%} of the completions"
    elif cap and not w.last(CUT) and w.mean(LENGTH) > w.limits.at_cap * cap:
        yield "truncation", "", f"they have {w.mean(LENGTH):.0f} of {cap} tokens on average"


def engine(w: Watch) -> Alarms:
    """Yield an alert on an engine that does not sample from the policy."""
    limits, start = w.limits, len(w.lines) - w.window
    latest, first = w.last(DIFFERENCE, 0, 2), w.mean(DIFFERENCE, start)
    drift = w.mean(DIFFERENCE) > max(limits.drift * first, limits.difference / 10)
    drift = drift and w.sure(DIFFERENCE, start) > limits.certainty
    if len(latest) == 2 and (min(latest) > limits.difference or drift):
        yield "samples differ", "", f"{latest[-1]:.3f} nats a token, in the first steps {first:.3f}"


def policy(w: Watch) -> Alarms:
    """Yield alerts on a policy that moves far from its base, or becomes certain too early."""
    limits, start = w.limits, len(w.lines) - w.window
    kl = w.last("kl", 0, len(w.lines))
    before, after = (median(part or [math.nan]) for part in (kl[:10], kl[-10:]))
    if len(kl) >= 20 and after > max(limits.kl, limits.kl_ratio * before):
        yield "kl grows", "", f"{before:.3g} → {after:.3g} nats a token"
    share = w.mean("entropy") / (w.mean("entropy", start) or 1)
    falls = share < limits.certain and w.sure("entropy", start) < -limits.certainty
    if falls and w.success(w.correct) < limits.solved:
        evidence = f"{w.mean('entropy', start):.3g} → {w.mean('entropy'):.3g} nats a token"
        yield "entropy collapse", "", f"{evidence}; {_earned(w)}"


def signal(w: Watch) -> Alarms:
    """Yield alerts on zero-advantage groups, and on rewards and held-out figures that fall.

    A fall of a held-out figure counts only while the reward does not fall. Held-out accuracy that
    stays while the reward rises raises an alert, too.
    """
    limits, start = w.limits, len(w.lines) - w.window
    silent, right = w.mean(SILENT), w.success(w.correct)
    evidence = f"in {silent:.0%} of the groups all completions earn the same; {_earned(w)}"
    # Unsloth's GPU trainer logs no entropy; the share of distinct samples is a substitute.
    diversity = "entropy" if w.last("entropy") else "groups/distinct"
    share = w.mean(diversity) / (w.mean(diversity, start) or 1)
    is_growing = w.sure(SILENT, start) > limits.certainty
    is_uniform = is_growing and silent - right > 1 - limits.solved
    low, full = w.ends()
    is_low = w.mean("reward") - low <= (1 - limits.no_signal) * (full - low)
    # A collapse may come before the first window ends.
    has_fallen = _lost(w, max(2, math.ceil(limits.completions / 2 / w.each))) if is_low else ""
    if is_low and not has_fallen and silent > limits.no_signal and _moved(w):
        has_fallen = _lost(w, 1)  # a step or two may do it
    is_enough = len(w.lines) * w.each >= limits.enough / 5
    is_unsolved, groups = right < limits.solved, w.window * max(1, w.each // GROUP)
    is_losing = is_growing and w.sure("reward", start) > 0
    most, least = w.least(SILENT, groups), limits.losing if is_losing else limits.little_signal
    # At most a share `right` of all groups can consist of right answers alone.
    if is_uniform and share < limits.entropy:
        yield "collapse", "", f"{diversity} at {share:.0%} of its start, {evidence}"
    elif has_fallen:
        yield "collapse", "", has_fallen
    elif not is_unsolved and most > limits.saturated:
        yield "nothing left to learn", "", evidence
    elif silent > limits.no_signal and is_enough:
        yield "nothing learnt", "", evidence
    elif is_unsolved and most > least:
        yield "little signal", "", evidence
    elif not w.is_scheduled() and (fall := _lost(w, w.many())):
        yield "reward falls", "", fall
    falls = {what: _held_out_fall(w, key) for key, what in HELD_OUT.items() if not is_low}
    for what, evidence in falls.items():
        if evidence:
            yield "reward hacking", what, evidence
    if not any(falls.values()) and (evidence := _unfollowed(w)):
        yield "held-out accuracy does not follow", "", evidence


def _earned(w: Watch) -> str:
    """Say what share of the possible score the mean completion earns.

    The score is that of the reward `correct`, or else the weighted total.
    """
    payer = f"`{w.correct}`" if w.correct else "the rewards"
    most = "paid at most" if w.settled & ({w.correct} if w.correct else w.settled) else "can pay"
    return f"the mean completion earns {w.success(w.correct):.0%} of what {payer} {most}"


def _moved(w: Watch) -> bool:
    """Return whether the completions' length or entropy has halved or doubled since the start."""
    firsts = {key: w.lines[0].get(key) for key in ("entropy", LENGTH)}
    shares = [w.mean(key) / first for key, first in firsts.items() if is_number(first) and first]
    return any(not 0.5 <= share <= 2 for share in shares if is_number(share))


def _lost(w: Watch, part: int) -> str:
    """Return the evidence that the reward is far below its best mean over `part` lines, or "".

    If `part` is 1, the noise of that line is not estimated; it counts as the effect of a single
    completion.
    """
    (low, full), now = w.ends(), max(part, w.window)
    if len(w.lines) < now:
        return ""
    best, ago = w.best("reward", part)
    fall = best - w.mean("reward", 0, now)
    then = w.noise(ago, part) if part > 1 else w.spread("reward") / w.each
    error = math.hypot(then, w.noise(0, now))
    is_far = fall > w.limits.far * (full - low) and fall > w.limits.certainty * error
    return f"the reward was {best:.3g}, and is {w.mean('reward'):.3g}" if is_far else ""


def _held_out_fall(w: Watch, key: str) -> str:
    """Return the evidence that a held-out figure fell and the reward did not; "" otherwise."""
    points = [(at, line[key]) for at, line in w.evals if is_number(line.get(key))]
    at, best = max(points, key=lambda point: point[1], default=(0, 0.0))
    half = w.window // 2
    # Half a window, because a whole one would hide a collapse within it.
    rise, error = w.rise("reward", min(len(w.lines) - half, len(w.lines) - at), half)
    for last, share in ((1, 1.0), (2, 0.75)):  # two validations in a row need to fall by less
        if len(points) <= last or not rise > -2 * error:
            return ""
        end = max(value for _, value in points[-last:])
        noise = math.sqrt(abs((best + end) * (2 - best - end)) / 2 / max(1, w.expected.eval_rows))
        if best - end > max(share * w.limits.certainty * noise, w.limits.least_fall):
            return f"held-out {best:.0%} → {end:.0%}, reward no lower"
    return ""


def _unfollowed(w: Watch) -> str:
    """Return the evidence that the reward rose and held-out accuracy did not; "" otherwise."""
    points = [line["eval/accuracy"] for _, line in w.evals if is_number(line.get("eval/accuracy"))]
    (low, full), ago = w.ends(), len(w.lines) - w.window
    rise, error = w.rise("reward", ago)
    share = rise / ((full - low) or 1)
    if len(points) < 4 or share < w.limits.unfollowed or rise < w.limits.certainty * error:
        return ""
    first, last = fmean(points[:2]), fmean(points[-2:])
    noise = math.sqrt((first + last) * (2 - first - last) / 4 / max(1, w.expected.eval_rows))
    if last - first + 2 * noise > share / 2 or max(first, last) >= w.limits.solved:
        return ""
    return f"the reward rose by {share:.0%} of its range, held-out {first:.0%} → {last:.0%}"


def rewards(w: Watch) -> Alarms:
    """Yield alerts on rewards that do not rise, that dominate, or that never change."""
    names, limits = w.expected.rewards, w.limits
    is_learnt = max(w.success(w.correct), w.success("")) >= limits.solved
    learnt = [n for n in names if w.correct != n and w.success(n) >= limits.solved]
    if not is_learnt and not w.is_scheduled():
        if w.correct and learnt:
            key, top = f"rewards/{w.correct}/mean", names[w.correct][2]
            if evidence := w.flat(key, top):
                yield "format learnt, correctness flat", learnt[0], evidence
        elif evidence := w.flat("reward", w.ends()[1]):
            yield "reward stuck", "", evidence
    count = w.many()
    stds = {name: w.mean(f"rewards/{name}/std", 0, count) for name in names}
    spread = {name: abs(v[0]) * stds[name] for name, v in names.items()}
    for name in names:
        share = spread[name] / (sum(spread.values()) or 1)
        if w.correct and name != w.correct and share > limits.dominant and not is_learnt:
            yield "one reward dominates", name, f"{share:.0%} of the weighted spread"
    yield from constant(w, w.limits.enough // 5)


def constant(w: Watch, least: int) -> Alarms:
    """Yield an alert on rewards that stay constant over `least` completions while others vary.

    A reward that is always earned in full raises no alert.
    """
    if len(w.lines) * w.each < least or len(w.lines) < w.window:
        return
    curves = {n: w.last(f"rewards/{n}/mean", 0, len(w.lines)) for n in w.expected.rewards}
    same = {n for n, values in curves.items() if len(values) > 1 and len(set(values)) == 1}
    low = {name for name in same if curves[name][0] < w.expected.rewards[name][2] - 1e-6}
    if low and len(same) < len(curves):
        values = ", ".join(f"{curves[name][0]:.3g}" for name in sorted(low))
        count = f"in all of {len(w.lines) * w.each:,} completions"
        yield "constant reward", ", ".join(sorted(low)), f"{values} {count}"


RULES = (engine, steps, policy, signal, rewards)


# -- what is said of a whole run


def learning_alerts() -> set[str]:
    """Return the names of the alerts to ignore in a placebo run, which is not meant to learn."""
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
    lines, (rise, error) = len(watch.lines), watch.rise_of_halves()
    count = lines * watch.each
    change = f"{rise:+.3g} ± {2 * error:.2g} between halves of {count:,} completions"
    if math.isnan(rise):
        change = f"{lines} logged lines are too few"
    if lines >= watch.window and rise > 2 * error:
        return Check("reward rises", "ok", change)
    missing = watch.limits.enough - count
    if missing > 0:
        more = math.ceil(missing / max(1, watch.expected.completions))
        change += f"; it takes {more} more steps to tell"
    return Check("reward rises", "warning", change, f"train longer, or see {PAGE}")
