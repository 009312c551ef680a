"""Say what is wrong with a run: each function yields (rule, what it is about, evidence).

A rule reads a `health.Watch`. A metric that a run does not log is NaN there; every comparison with
it is false, so its rules are silent.
"""

import math
from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from grpo_nb.training.health import Watch

Alarms = Iterator[tuple[str, str, str]]

# TRL's name for how far vLLM's log-probabilities are from the policy's [nats per token].
DIFFERENCE = "sampling/sampling_logp_difference/mean"
LENGTH, CUT = "completions/mean_length", "completions/clipped_ratio"
SILENT = "frac_reward_zero_std"
GROUP = 16  # completions, at most, in most groups

# If one of these held-out figures falls and the reward does not, the policy hacks the rewards. The
# second figure does not depend on the rewards: pleas may persuade a judge to accept other answers.
EXACT = "fewer answers are the reference"  # they may be right in other words: a reader decides
HELD_OUT = {"eval/accuracy": "held-out accuracy falls", "eval/exact": EXACT}


def steps(w: "Watch") -> Alarms:
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
        high = len(peaks) == 2 and len(past) >= 2 * w.window
        if high and min(peaks) > limits.spike * max(past):
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


def _truncated(w: "Watch") -> Alarms:
    """Yield an alert if many completions are cut, and no fewer than before."""
    cap = w.expected.max_completion_length
    half = max(2, w.window // 2)
    if w.least(CUT) > w.limits.truncated and w.sure(CUT, half, half) > -2:
        yield "truncation", "", f"{w.mean(CUT):.0%} of the completions"
    elif cap and not w.last(CUT) and w.mean(LENGTH) > w.limits.at_cap * cap:
        yield "truncation", "", f"they have {w.mean(LENGTH):.0f} of {cap} tokens on average"


def engine(w: "Watch") -> Alarms:
    """Yield an alert on an engine that does not sample from the policy."""
    limits, start = w.limits, len(w.lines) - w.window
    latest, first = w.last(DIFFERENCE, 0, 2), w.mean(DIFFERENCE, start)
    drift = w.mean(DIFFERENCE) > max(limits.drift * first, limits.difference / 10)
    drift = drift and w.sure(DIFFERENCE, start) > limits.certainty
    if len(latest) == 2 and (min(latest) > limits.difference or drift):
        yield "samples differ", "", f"{latest[-1]:.3f} nats a token, in the first steps {first:.3f}"


def policy(w: "Watch") -> Alarms:
    """Yield alerts on a policy that leaves its base, or becomes certain."""
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


def signal(w: "Watch") -> Alarms:
    """Yield alerts on zero-advantage groups, and on rewards and held-out figures that fall.

    A held-out fall counts only while the reward does not fall.
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
    elif silent <= limits.no_signal and is_unsolved and most > least:
        yield "little signal", "", evidence
    elif not w.is_scheduled() and (fall := _lost(w, w.many())):
        yield "reward falls", "", fall
    for key, what in HELD_OUT.items():
        if not is_low and (evidence := _held_out_fall(w, key)):
            yield "reward hacking", what, evidence


def _earned(w: "Watch") -> str:
    """Say how much of what the correct reward, or else all rewards, can pay is earned."""
    payer = f"`{w.correct}`" if w.correct else "the rewards"
    return f"the mean completion earns {w.success(w.correct):.0%} of what {payer} can pay"


def _lost(w: "Watch", part: int) -> str:
    """Return the evidence that the reward fell far below its best in `part` lines; "" otherwise."""
    (low, full), now = w.ends(), max(part, w.window)
    if len(w.lines) < now:
        return ""
    best, ago = w.best("reward", part)
    fall = best - w.mean("reward", 0, now)
    error = math.hypot(w.noise(ago, part), w.noise(0, now))
    is_far = fall > w.limits.far * (full - low) and fall > w.limits.certainty * error
    return f"the reward was {best:.3g}, and is {w.mean('reward'):.3g}" if is_far else ""


def _held_out_fall(w: "Watch", key: str) -> str:
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


def rewards(w: "Watch") -> Alarms:
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


def constant(w: "Watch", least: int) -> Alarms:
    """Yield an alert on rewards that are the same in at least `least` completions; others vary."""
    if len(w.lines) * w.each < least or len(w.lines) < w.window:
        return
    curves = {n: w.last(f"rewards/{n}/mean", 0, len(w.lines)) for n in w.expected.rewards}
    same = {n for n, values in curves.items() if len(values) > 1 and len(set(values)) == 1}
    low = {name for name in same if curves[name][0] < w.expected.rewards[name][2] - 1e-6}
    if low and len(same) < len(curves):
        values = ", ".join(f"{curves[name][0]:.3g}" for name in sorted(low))
        count = f"in all of {len(w.lines) * w.each:,} completions"
        yield "constant reward", ", ".join(sorted(low)), f"{values} {count}"


def is_number(value: object) -> bool:
    """Return whether a value of a log is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


# Metrics without which some rules are silent.
NEEDS = (LENGTH, CUT, SILENT, "grad_norm", "kl", "entropy", DIFFERENCE, "eval/accuracy")
PARTS = (engine, steps, policy, signal, rewards)
