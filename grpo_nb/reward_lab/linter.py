"""Find faults of rewards that show without knowing what is right: by calling them again.

Each reward is called again on the same batch, in another order and at another time, on parts of it,
and on longer and longer texts. What it changes in the process is put back and reported.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb.reward_lab.mentions import names_used
from grpo_nb.reward_lab.scoring import Fault, Pair, Scorer, clock, silent
from grpo_nb.rewards.calls import kept

CALLS = 4  # on the same batch, where something has changed: chance may spare two of them
NOISE = 1e-6  # largest difference between scores that count as equal
SLOW, HANGS = 1.0, 60.0  # seconds for one completion of the largest length
TOWER = 0.005  # seconds that computing 7**300000 takes at least
PATIENCE = 0.05  # texts are not made longer once they take this long [s]
LENGTHS = (12, 17, 22, 28, 40, 80, 300, 1000, 3000, 8000)
IN_GROWTH = 1.0  # seconds that one call may take in this test
ENOUGH = 0.3  # seconds after which a case is not timed again
ALL = 1.0  # seconds of the processor for this test of a reward, and three times as many in all
LEAST_POWER = 0.5  # a time that grows by less does not depend on the length
STEEP = 6.0  # a time that grows by more than this power of the length grows exponentially
# Names by which code gets random numbers that no seed controls.
RANDOM = {"random", "uniform", "gauss", "randint", "choice", "default_rng", "urandom", "uuid4"}
CLOCK = {"time", "monotonic", "perf_counter", "now", "utcnow", "today"}
LATER = 100_000.0  # how far the clocks are set forward [s]
# Texts on which regular expressions and loops often take long: repeated, after what begins them.
STRESS = (
    ("", " "), ("", "\n"), ("", "1"), ("", "1,"), ("", "a"), ("", "a "), ("<answer>", "thinking "),
    ("<think>", "thinking "), ("", "<answer>"), ("", "<think>\n"), ("\\boxed{", "{"), ("", "("),
    ("", "1+"), ("{", '"a":'), ("$", "\\frac{1}"), ("", "so it is. "),
)  # fmt: skip


def changed(before: Sequence[float], after: Sequence[float]) -> int:
    """Return how many scores differ."""
    return int((~np.isclose(before, after, rtol=0, atol=NOISE, equal_nan=True)).sum())


def repeatability(scorer: Scorer, number: int, batch: Sequence[Pair]) -> Fault | None:
    """Return how the scores of a batch depend on anything but rows and completions.

    One call, in another order and at another time of day, is enough where nothing has changed. A
    reward that compares the completions of a batch, without other faults, is added to
    `scorer.grouped`, and its scores are forgotten.

    Args:
        scorer: The rewards; scores from before are compared too.
        number: The reward.
        batch: Pairs, those of a row next to each other.

    Raises:
        Exception: Whatever the reward raises.
    """
    before = scorer.scores(batch)[:, number]
    if scorer.is_slow(number):
        again, fault = scorer.call(number, batch), None
        if changed(before, again):  # a time limit of its own, perhaps
            fault = _unequal(scorer, number, batch, calls=2)
    else:
        with _later():
            again = scorer.call(number, batch[::-1])[::-1]
        fault = _named(scorer, number, batch, before) if changed(before, again) else None
    if fault is None and number not in scorer.grouped:
        fault = _grouped(scorer, number, batch, again)
    return fault or _remembered(scorer, number)


def _unequal(
    scorer: Scorer, number: int, batch: Sequence[Pair], calls: int = CALLS
) -> Fault | None:
    """Return a fault if calls on the same batch give other scores."""
    first, *others = (scorer.call(number, batch) for _ in range(calls))
    if count := max(changed(first, other) for other in others):
        cause = _cause(scorer, number, batch)
        return Fault(cause, f"{count} of {len(batch)} scores changed on a second call")
    return None


def _named(
    scorer: Scorer, number: int, batch: Sequence[Pair], before: Sequence[float]
) -> Fault | None:
    """Return what made scores change: chance, the clock, the order, or calls from before."""
    size = len(batch)
    if fault := _unequal(scorer, number, batch):
        return fault
    first = scorer.call(number, batch)
    with _later():
        if count := changed(first, scorer.call(number, batch)):
            return Fault("clock", f"{count} of {size} scores change with the time of day")
    if count := changed(first, scorer.call(number, batch[::-1])[::-1]):
        return Fault("order", f"{count} of {size} scores changed when the batch was reordered")
    fault = _grouped(scorer, number, batch, first)
    if fault is None and number not in scorer.grouped and (count := changed(before, first)):
        return Fault("state", f"{count} of {size} scores changed after the first call")
    return fault


def _remembered(scorer: Scorer, number: int) -> Fault | None:
    """Return a fault if the first call of all, made again, gives other scores."""
    if not scorer.first or not scorer.failed.isdisjoint(scorer.first):
        return None
    again = scorer.call(number, scorer.first)
    count = changed(scorer.first_scores[:, number], again)
    evidence = f"{count} of {len(again)} scores changed after the first calls"
    return Fault("state", evidence) if count else None


def _grouped(
    scorer: Scorer, number: int, batch: Sequence[Pair], scores: Sequence[float]
) -> Fault | None:
    """Add a reward to `scorer.grouped` if completions earn something else in smaller batches.

    These are a batch with one completion of each row, each of another kind, and one alone. A fault
    is returned if it is chance that they do.
    """
    rows = list(dict.fromkeys(row for row, _ in batch))
    places = [[n for n, pair in enumerate(batch) if pair[0] == row] for row in rows]
    apart = [each[kind % len(each)] for kind, each in enumerate(places)]
    for choice in (apart, apart[-1:]):
        earned = scorer.call(number, [batch[place] for place in choice])
        if changed([scores[place] for place in choice], earned):
            if fault := _unequal(scorer, number, batch):
                return fault
            scorer.grouped.add(number)
            scorer.forget(number)
            return None
    return None


def _cause(scorer: Scorer, number: int, batch: Sequence[Pair]) -> str:
    """Return why two calls differ: "random", or "state" if it remembers earlier calls."""
    if CLOCK & names_used(scorer.funcs[number]):
        return "clock"
    one, other, again = (scorer.call(number, batch, seed=seed) for seed in ("1", "2", "1"))
    if not changed(one, again):
        return "random" if changed(one, other) else "state"
    return "random" if RANDOM & names_used(scorer.funcs[number]) else "state"


@contextmanager
def _later() -> Iterator[None]:
    """Set the clocks of the module `time` forward."""
    names = ("time", "monotonic", "perf_counter")
    clocks = {name: getattr(time, name) for name in names}
    try:
        for name, clock in clocks.items():
            setattr(time, name, lambda clock=clock: clock() + LATER)
        yield
    finally:
        for name, clock in clocks.items():
            setattr(time, name, clock)


def side_effects(scorer: Scorer, number: int, batch: Sequence[Pair]) -> list[str]:
    """Return what a reward changes in the process and in its arguments, as phrases."""
    func, effects = scorer.funcs[number], []
    states: dict[str, list[Any]] = {}
    with kept(), silent():
        for seed in (1, 2):
            _seed(seed)
            arguments = scorer.arguments(number, batch)
            original = {name: deepcopy(v) for name, v in arguments.items() if isinstance(v, list)}
            folder = Path.cwd()
            _without_restoring(func, arguments)
            if Path.cwd() != folder:
                effects.append("it changes the working directory")
                os.chdir(folder)
            for name, state in _states().items():
                states.setdefault(name, []).append(state)
            effects += [f"it changes `{n}`" for n, v in original.items() if v != arguments[n]]
    effects += [f"it seeds {name}" for name, (one, two) in states.items() if one == two]
    return list(dict.fromkeys(effects))


def _without_restoring(func: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a reward directly, because `run` would put back what it changes."""
    result = func(**arguments)
    if hasattr(result, "__await__"):
        result.close()  # it was not started, so it has changed nothing


def _seed(seed: int) -> None:
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)


def _states() -> dict[str, Any]:
    states = {"random": random.getstate()}
    if numpy := sys.modules.get("numpy"):
        states["numpy"] = numpy.random.get_state()[1].tobytes()
    if torch := sys.modules.get("torch"):
        states["torch"] = torch.default_generator.get_state().numpy().tobytes()
    return states


def growth(
    scorer: Scorer, number: int, row: int, longest: int, writers: Sequence[Callable[[str], str]]
) -> Fault | None:
    """Return a fault if the reward would take long on a completion of the largest length.

    Lengths grow by small factors, and a text is made longer only while the shorter one was quick,
    so that even a time that grows exponentially is measured and not waited for.

    Args:
        scorer: The rewards.
        number: The reward.
        row: The row whose columns it gets.
        longest: The largest length of a completion [characters].
        writers: Functions that write a text into a completion, such as the form's.
    """
    limit, scorer.limit = scorer.limit, IN_GROWTH
    try:
        result = _growth(scorer, number, row, longest, writers)
    finally:
        scorer.limit = limit
    if number in scorer.faults and scorer.faults[number].rule == "slow":
        scorer.limit = IN_GROWTH  # it may go on, but is not waited for so long again
        del scorer.faults[number]
        evidence = f"more than {IN_GROWTH:g} s for one completion of up to {longest:,} characters"
        return result or Fault("hangs", evidence)
    return result


def _growth(
    scorer: Scorer, number: int, row: int, longest: int, writers: Sequence[Callable[[str], str]]
) -> Fault | None:
    """Return what `growth` returns."""
    cases = [(begin, unit, write) for write in writers for begin, unit in STRESS]
    worst, before = (0.0, "", 0.0), LENGTHS[0]
    start, begun = time.thread_time(), clock()
    spent, duration = scorer.each[number] * len(cases), 0.0  # in one batch

    def is_late() -> bool:
        """Return whether the test took enough time of its own, or several times as much."""
        waited = clock() - begun
        return time.thread_time() - start > ALL or waited > 3 * ALL

    for length in [each for each in LENGTHS if each < longest] + [longest]:
        if spent < PATIENCE:
            spent = scorer.seconds[number]
            duration = _seconds(scorer, number, row, cases, length)
            spent = scorer.seconds[number] - spent
            # Not even if one case took all of it, and its time grew as the cube of the length.
            if duration < PATIENCE / 4 or duration * (longest / length) ** 3 < SLOW:
                before = length
                continue
        for case in list(cases):
            # Late or not, the case that made the whole batch slow is looked for.
            if is_late() and (duration <= ALL or worst[0] >= SLOW):
                break
            estimate, power = _extrapolated(scorer, number, row, case, before, length, longest)
            if power >= LEAST_POWER:
                worst = max(worst, (estimate, case[1], power))
                cases.remove(case)
        if number in scorer.faults or not cases or is_late():
            break
        before = length
    seconds, unit, power = worst
    if seconds < SLOW:
        return None
    takes = "more than 10 s" if seconds > 10 else f"about {seconds:.2g} s"
    evidence = f"{takes} for one completion of {longest:,} characters: {unit!r} repeated"
    return Fault("hangs" if power > STEEP and seconds > HANGS else "slow", evidence)


def _extrapolated(
    scorer: Scorer, number: int, row: int, case: tuple, before: int, length: int, longest: int
) -> tuple[float, float]:
    """Return the seconds for the largest length, and the power of the length with which they grow.

    The power is 0 where the text is scored quickly, or where a steep growth does not last.
    """
    duration = _seconds(scorer, number, row, [case], length)
    if duration <= PATIENCE / 4:
        return 0.0, 0.0
    earlier = _seconds(scorer, number, row, [case], before)
    power = float(np.log(duration / earlier) / np.log(max(length / before, 1.01)))
    if power > STEEP:
        longer = _seconds(scorer, number, row, [case], int(length * 1.15))
        power = power if longer > 1.6 * duration else 0.0
    return float(duration * (longest / length) ** np.clip(power, 0, 40)), power


def _seconds(scorer: Scorer, number: int, row: int, cases: Sequence[tuple], length: int) -> float:
    """Return the seconds that a reward takes to score each case at this length, in one batch."""
    pairs = [(row, write(begin + unit * (length // len(unit)))) for begin, unit, write in cases]
    duration = np.inf
    for _ in range(2):  # the first time may be another process's
        duration = min(duration, max(_timed(scorer, number, pairs), 1e-7))
        if duration < PATIENCE / 4 or duration > ENOUGH:
            break
    return duration


def tower(scorer: Scorer, number: int, row: int, write: Callable[[str], str]) -> Fault | None:
    """Return a fault if the reward computes powers of any size that a completion asks for."""
    small, large = ([(row, write(text))] for text in ("7**2", "7**300000"))
    if _timed(scorer, number, large) < TOWER:
        return None
    base, duration = (min(_timed(scorer, number, p) for _ in range(3)) for p in (small, large))
    if duration < TOWER or duration < 20 * base:
        return None
    return Fault("hangs", "it computes 7**300000 as an answer, so 9**9**9 would never end")


def _timed(scorer: Scorer, number: int, pairs: Sequence[Pair]) -> float:
    start = time.thread_time()  # other processes do not count
    scorer._safe(number, pairs)
    return time.thread_time() - start
