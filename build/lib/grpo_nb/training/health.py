"""Raise alerts from the metrics of a training run, each with a cause, evidence and a remedy.

No limit is an absolute reward, KL or gradient norm: a window of steps is compared with the run's
own past, its noise, and the range of its rewards. The same alert is raised again only after a
window of steps without its cause.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, NamedTuple

from grpo_nb.runs import Check
from grpo_nb.runs.files import read_json, read_lines, read_yaml

# The texts of each alert, its limits, and the number of recorded tiny runs that raised it
# (`python benchmarks/alarms.py rates` writes the third file).
ALERTS = read_yaml(Path(__file__).with_name("alerts.yaml"))
LIMITS = SimpleNamespace(**read_yaml(Path(__file__).with_name("alert_limits.yaml")))
RATES = read_json(Path(__file__).with_name("alert_rates.json"))
# The same for the alerts about judges (`python benchmarks/judge.py --faults` writes it).
JUDGE_RATES = read_json(Path(__file__).with_name("judge_rates.json"))
PAGE = "docs/troubleshooting.md"
# TRL's name for how far vLLM's log-probabilities are from the policy's [nats per token].
DIFFERENCE = "sampling/sampling_logp_difference/mean"
HABITS = ("length", "markup", "style")  # what a judge's scores may correlate with (`judges.habits`)
# If one of these held-out figures falls and the reward does not, the policy hacks the rewards. The
# second figure does not depend on the rewards: pleas may persuade a judge to accept other answers.
EXACT = "fewer answers are the reference"  # they may be right in other words: a reader decides
HELD_OUT = {"eval/accuracy": "held-out accuracy falls", "eval/exact": EXACT}


def section(name: str) -> str:
    """Return the address of the handbook's section on an alert or a check.

    >>> section("format learnt, correctness flat")
    'docs/troubleshooting.md#format-learnt-correctness-flat'
    """
    return f"{PAGE}#{re.sub(r'[^a-z]+', '-', name.lower())}"


def rates(rule: str) -> str:
    """Say how many of the recorded tiny runs of each kind (clean, …) raised the alert."""
    corpus = RATES if rule in RATES["alerts"] else JUDGE_RATES
    if rule not in corpus["alerts"]:
        return "error rate not measured"
    counts = corpus["alerts"][rule]
    shares = [f"{counts[kind]} of {runs} {kind}" for kind, runs in corpus["runs"].items()]
    return f"recorded tiny runs: {', '.join(shares)}"


class Expected(NamedTuple):
    """Hold the facts about a training run that are known before its first step.

    rewards: {name: (weight, lowest score, highest score)}; the first reward decides what is
        correct.
    completions: Number of completions scored in a step.
    eval_rows: Number of prompts of the validation split.
    max_steps: Number of training steps.
    memory_gib: Memory that training may use.
    """

    rewards: Mapping[str, tuple[float, float, float]]
    completions: int = 64
    eval_rows: int = 64
    max_steps: int = 0
    memory_gib: float = math.inf


class Watch:
    """Raise alerts from training metrics, which `feed` takes one logged line at a time."""

    def __init__(self, expected: Expected) -> None:
        self.expected, self.limits = expected, LIMITS
        self.lines, self.evals, self._held = [], [], {}

    def feed(self, line: Mapping[str, Any]) -> list[Check]:
        """Take one line of metrics, and return the alerts that it raises."""
        if _number(line.get("eval/accuracy")):
            self.evals.append((len(self.lines), line))
        self.lines += [line] if "reward" in line else []
        new, now = [], len(self.lines)
        for rule, about, evidence in chain(*(part(self) for part in PARTS)):
            if now - self._held.get((rule, about), -math.inf) > self.limits.window:
                cause, fix = (ALERTS[rule][part].format(about) for part in ("cause", "fix"))
                sentence = f"step {line.get('step') or now}: {cause} ({evidence}; {rates(rule)})"
                grave = "grave" in ALERTS[rule] and about != EXACT
                fix += f"; see {section(rule)}"
                new.append(Check(rule, "stop" if grave else "warning", sentence, fix))
            self._held[rule, about] = now
        return new

    def holding(self) -> set[str]:
        """Return the rules whose conditions were met within the last window of lines."""
        now = len(self.lines)
        return {rule for (rule, _), at in self._held.items() if now - at <= self.limits.window}

    def last(self, key: str, ago: int = 0, count: int = 0) -> list[float]:
        """Return a metric's values in the window that ended `ago` lines ago; [] if incomplete."""
        start = len(self.lines) - ago - (count or self.limits.window)
        lines = self.lines[start : len(self.lines) - ago] if start >= 0 else []
        return [line[key] for line in lines if _number(line.get(key))]

    def mean(self, key: str, ago: int = 0) -> float:
        """Return a metric's mean in the window that ended `ago` lines ago; NaN without values."""
        return fmean(self.last(key, ago) or [math.nan])

    def rise(self, key: str, ago: int, count: int = 0) -> tuple[float, float]:
        """Return the rise of a window's mean over `ago` lines, and the rise's standard error."""
        then, now = self.last(key, ago, count), self.last(key, 0, count)
        if min(len(then), len(now)) < 2:
            return math.nan, math.nan  # every comparison with NaN is false
        errors = [math.dist(v, [fmean(v)] * len(v)) / (len(v) - 1) for v in (then, now)]
        return fmean(now) - fmean(then), math.hypot(*errors) + 1e-9

    def sure(self, key: str, ago: int) -> float:
        """Return the rise of a window's mean over `ago` lines, divided by the standard error."""
        rise, error = self.rise(key, ago)
        return rise / error

    def flat(self, key: str, full: float) -> str:
        """Return evidence that a curve does not rise; "" if it does, or if noise may hide it."""
        for span in (self.limits.patience << double for double in range(12)):
            rise, error = self.rise(key, span // 2, span // 2)
            least = self.limits.flat * (full - self.mean(key)) * span / self.limits.patience
            if rise <= 2 * error and rise + 2 * error < least:
                return f"{self.mean(key):.3f}, {rise:+.3f} ± {2 * error:.3f} in {span} steps"
        return ""

    def ends(self) -> list[float]:
        """Return the lowest and the highest possible weighted total."""
        ranges = self.expected.rewards.values()
        return [sum(pick(v * a, v * b) for v, a, b in ranges) for pick in (min, max)]

    def success(self, name: str) -> float:
        """Return the share of a reward's range that the last window earns on average."""
        _, low, high = self.expected.rewards[name]
        factor = fmean(self.last(f"{name}/factor") or [1]) or 1  # of a scheduled reward
        return (self.mean(f"rewards/{name}/mean") / factor - low) / ((high - low) or 1)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _steps(w: Watch) -> Iterator[tuple[str, str, str]]:
    """Yield alerts on values that are not numbers, on spikes, and on lengths of completions."""
    now, limits = (w.lines or [{}])[-1], w.limits
    for key in ("loss", "reward", *(f"rewards/{name}/mean" for name in w.expected.rewards)):
        if key in now and not _number(now[key]):
            yield "not a number", key, f"{key} is {now[key]}"
    for key in ("grad_norm", "kl"):
        past = [v for v in w.last(key, 2, min(limits.patience, len(w.lines) - 2)) if v > 0]
        peaks = w.last(key, 0, 2)  # a spike of a single step is common and harmless
        high = len(peaks) == 2 and len(past) >= 2 * limits.window
        if high and min(peaks) > limits.spike * max(past):
            yield "spike", key, f"{peaks[0]:.3g} and {peaks[1]:.3g}, at most {max(past):.3g} before"
    cut, length = "completions/clipped_ratio", "completions/mean_length"
    if w.mean(cut) > limits.truncated and w.sure(cut, limits.window) > -2:
        yield "truncation", "", f"{w.mean(cut):.0%} of the completions"
    for ago in (limits.patience, len(w.lines) - limits.window):
        before, after = w.mean(length, ago), w.mean(length)
        if after > limits.longer * before and w.sure("reward", ago) <= 2 < w.sure(length, ago):
            yield "length creep", "", f"{before:.0f} → {after:.0f} tokens in {ago} steps"


def _machine(w: Watch) -> Iterator[tuple[str, str, str]]:
    """Yield alerts on the engine and on memory; they do not depend on what the model learns."""
    limits, now, start = w.limits, len(w.lines), len(w.lines) - w.limits.window
    latest, first = w.last(DIFFERENCE, 0, 2), w.mean(DIFFERENCE, start)
    drift = w.mean(DIFFERENCE) > max(limits.drift * first, limits.difference / 10)
    drift = drift and w.sure(DIFFERENCE, start) > limits.certainty
    if len(latest) == 2 and (min(latest) > limits.difference or drift):
        yield "samples differ", "", f"{latest[-1]:.3f} nats a token, in the first steps {first:.3f}"
    key, windows = "memory_gib", [place * limits.window for place in range(5)]
    means = [w.mean(key, ago) for ago in windows]  # the latest window first
    pace = min(late - early for late, early in pairwise(means)) / limits.window
    if pace > 0 and w.sure(key, windows[-1]) > limits.certainty:
        end = now + (w.expected.memory_gib - means[0]) / pace
        if end < w.expected.max_steps:
            evidence = f"{pace:.3f} GiB more each step, {means[0]:.1f} GiB now"
            yield "memory grows", "", f"{evidence}; {w.expected.memory_gib:.1f} at step {end:.0f}"


def _signal(w: Watch) -> Iterator[tuple[str, str, str]]:
    """Yield alerts on zero-advantage groups, and on held-out figures that fall.

    A fall counts only while the reward does not fall.
    """
    key, limits, start = "frac_reward_zero_std", w.limits, len(w.lines) - w.limits.window
    silent, right = w.mean(key), w.success(next(iter(w.expected.rewards)))
    evidence = f"{silent:.0%} of the groups have zero advantage, success {right:.0%}"
    # Unsloth's GPU trainer logs no entropy; the share of distinct samples is a substitute.
    diversity = "entropy" if w.last("entropy") else "groups/distinct"
    share = w.mean(diversity) / (w.mean(diversity, start) or 1)
    is_uniform = w.sure(key, start) > limits.certainty and silent - right > 1 - limits.solved
    (low, full), earned = w.ends(), w.last("reward", start)
    is_low = w.mean("reward") - low <= (1 - limits.no_signal) * (full - low)
    has_fallen = is_low and max(earned, default=low) - low > (1 - limits.solved) * (full - low)
    # At most a share `right` of all groups can consist of right answers alone.
    if has_fallen or (is_uniform and share < limits.entropy):
        yield "collapse", "", f"{diversity} at {share:.0%} of its start, {evidence}"
    elif silent > limits.no_signal:
        yield "nothing left to learn" if right >= limits.solved else "nothing learnt", "", evidence
    for key, what in HELD_OUT.items():
        if not is_low and (evidence := _fall(w, key)):
            yield "reward hacking", what, evidence


def _fall(w: Watch, key: str) -> str:
    """Return the evidence that a held-out figure fell and the reward did not; "" otherwise."""
    points = [(at, line[key]) for at, line in w.evals if _number(line.get(key))]
    at, best = max(points, key=lambda point: point[1], default=(0, 0.0))
    half = w.limits.window // 2
    # Half a window, because a whole one would hide a collapse within it.
    rise, error = w.rise("reward", min(len(w.lines) - half, len(w.lines) - at), half)
    for last, share in ((1, 1.0), (2, 0.75)):  # two validations in a row need to fall by less
        if len(points) <= last or not rise > -2 * error:
            return ""
        end = max(value for _, value in points[-last:])
        noise = math.sqrt(abs((best + end) * (2 - best - end)) / 2 / w.expected.eval_rows)
        if best - end > share * w.limits.certainty * noise:
            return f"held-out {best:.0%} → {end:.0%}, reward no lower"
    return ""


def _rewards(w: Watch) -> Iterator[tuple[str, str, str]]:
    """Yield alerts on rewards that do not rise, that dominate, or that give no score."""
    rewards, limits, start = w.expected.rewards, w.limits, len(w.lines) - w.limits.window
    first, form = next(iter(rewards)), next((n for n in rewards if "_format_" in n), "")
    low, full = w.ends()
    is_learnt = max(w.success(first), (w.mean("reward") - low) / (full - low or 1)) >= limits.solved
    if not is_learnt and not any(w.last(f"{name}/factor") for name in rewards):
        is_formed = form not in ("", first) and w.success(form) >= limits.solved
        key, top = (f"rewards/{first}/mean", rewards[first][2]) if is_formed else ("reward", full)
        if evidence := w.flat(key, top):
            yield "format learnt, correctness flat" if is_formed else "reward stuck", form, evidence
    spread = {name: abs(v[0]) * w.mean(f"rewards/{name}/std") for name, v in rewards.items()}
    for name in rewards:
        share = spread[name] / (sum(spread.values()) or 1)
        if name != first and share > limits.dominant and not is_learnt:
            yield "one reward dominates", name, f"{share:.0%} of the weighted spread"
        key, most = f"{name}/skipped", limits.skipped * w.expected.completions
        if w.mean(key) > most or (w.sure(key, start) > limits.certainty and w.mean(key) > most / 5):
            yield "no score", name, f"{w.mean(key):.1f} of {w.expected.completions} completions"


def _episodes(w: Watch) -> Iterator[tuple[str, str, str]]:
    """Yield alerts on episodes; without an environment, the metrics are NaN, and none is raised."""
    share, start = w.mean("episodes/call_share"), len(w.lines) - w.limits.window
    before, (low, _) = w.mean("episodes/call_share", start), w.ends()
    if share < w.limits.entropy * before:
        yield "calls vanish", "", f"{before:.0%} → {share:.0%} of the episodes call a tool"
    gain, error = w.mean("episodes/gain"), w.rise("episodes/gain", start)[1]
    if gain + 2 * error <= 0 and w.mean("reward") > low:
        yield "calls without use", "", f"episodes with a call earn {gain:+.3f}"
    if (cut := w.mean("episodes/at_limit")) > w.limits.truncated:
        yield "turns to the limit", "", f"{cut:.0%} of the episodes"


def _judges(w: Watch) -> Iterator[tuple[str, str, str]]:
    """Yield alerts on judges; other rewards lack the metrics that are read here."""
    start = len(w.lines) - w.limits.window
    for name in w.expected.rewards:
        if (change := max(w.last(f"{name}/drift"), default=0)) > w.limits.judge_drift:
            yield "judge drifts", name, f"mean change {change:.2f} of a score"
        for habit in HABITS:
            key = f"{name}/{habit}"
            rise, error = w.rise(key, start)
            if rise > max(w.limits.habit, w.limits.certainty * error):
                evidence = f"correlation {w.mean(key, start):.2f} → {w.mean(key):.2f} in groups"
                yield "judge habit", key, evidence


PARTS = (_machine, _steps, _signal, _rewards, _episodes, _judges)


def summary(alerts: Iterable[Check]) -> str:
    """Return the alerts as text, one per line."""
    lines = (f"{alert.state}: {alert.name}, {alert.evidence} → {alert.fix}" for alert in alerts)
    return "\n".join(lines) or "no alerts"


def read_alerts(path: Path) -> list[Check]:
    """Return the alerts in the file train/health.jsonl, oldest first."""
    return [Check(*(line[field] for field in Check._fields)) for line in read_lines(path)]


def checks(watch: Watch, lines: Sequence[Mapping[str, Any]], alerts: list[Check]) -> list[Check]:
    """Return the checks that stage 03 records once training has ended.

    Args:
        watch: The watch that was fed with the lines.
        lines: The lines of train/metrics.jsonl.
        alerts: Every alert of the run.
    """
    steps, limits = [line["step"] for line in lines if "loss" in line], watch.limits
    whole = bool(steps) and steps == list(range(1, len(steps) + 1))
    lost = "steps are missing: run 03_train_grpo again"
    rules = watch.holding()
    live = list({alert.fix: alert for alert in alerts if alert.name in rules}.values())
    gravity = "stop" if "stop" in {alert.state for alert in live} else "warning"
    count = f"{len(alerts)} during training, {len(live)} of them still active at the end"
    count += f": {summary(live)}" if live else ""
    verdicts = [
        _check("tracking", whole, f"train/metrics.jsonl has {len(steps)} steps", lost, "stop"),
        _rise(watch),
        _check("alerts", not live, count, "follow the advice of the last one", gravity),
    ]
    shares = [line["eval/format"] for line in lines if _number(line.get("eval/format"))]
    if shares:
        form = f"{shares[0]:.0%} → {shares[-1]:.0%} in validation; at least {limits.solved:.0%}"
        form_fix = "train longer; raise the weight of the format reward"
        verdicts.append(_check("format", shares[-1] >= limits.solved, form, form_fix))
    return verdicts


def _check(name: str, passed: bool, evidence: str, fix: str, state: Any = "warning") -> Check:
    return Check(name, "ok", evidence) if passed else Check(name, state, evidence, fix)


def _rise(watch: Watch) -> Check:
    """Check that the reward rises from the first half of the steps to the second half."""
    steps, half = len(watch.lines), len(watch.lines) // 2
    if steps < watch.limits.window:
        few = f"{steps} steps are too few to tell"
        return Check("reward rises", "warning", few, "train longer: raise train.max_steps")
    rise, error = watch.rise("reward", steps - half, half)
    change = f"{rise:+.3f} ± {2 * error:.3f} (2 standard errors) between halves of {steps} steps"
    return _check("reward rises", rise > 2 * error, change, f"train longer, or see {PAGE}")
