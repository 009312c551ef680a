"""Find faults of rewards by calling them repeatedly, without knowing which answers are right.

Each reward is called again on the same batch, in another order and at another time, on parts of the
batch, and on longer and longer texts. Whatever the reward changes in the process is restored and
reported.
"""

import builtins
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_nb.reward_lab.scoring import Fault, Pair, Scorer, clock, cut, silent
from grpo_nb.reward_lab.source import names_used
from grpo_nb.rewards.calls import TookTooLong, kept
from grpo_nb.rewards.judge import GroupJudge, LLMJudge

CALLS = 4  # on the same batch: chance may spare two of them
NOISE = 1e-6  # largest difference between scores that count as equal
MARGIN = 0.15  # the same between grades of a judge
SLOW, HANGS = 1.0, 12.0  # seconds for one completion; a reward may have a time limit of its own
LIMIT = 2.0  # seconds for one call
ALL = 4.0  # seconds for the test of long texts, in which a slow case is looked for
REPEATS = (12, 17, 22, 28, 40, 150, 500, 2000, 20_000)  # of a text; then completions are full
FEW = 40  # repeats; what takes SLOW seconds for so few takes for ever for more
STEEP = 64  # what takes so many times as long for twice the length takes for ever, too
TOWER = 0.005  # seconds that computing 7**300000 takes at least
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


class Calls:
    """Call a reward again and again, and count the scores that differ from those of the first call.

    Args:
        scorer: The rewards.
        number: The number of the reward.
        batch: Pairs, with those of the same row next to each other.
    """

    def __init__(self, scorer: Scorer, number: int, batch: Sequence[Pair]) -> None:
        self.scorer, self.number, self.batch = scorer, number, batch
        self.first = dict(zip(batch, scorer.call(number, batch), strict=True))

    def changes(self, pairs: Sequence[Pair] = (), seed: str = "") -> int:
        """Call the reward on these pairs, or the batch, and return how many scores changed."""
        pairs = pairs or self.batch
        return self.differ(pairs, self.scorer.call(self.number, pairs, seed=seed))

    def differ(self, pairs: Sequence[Pair], scores: Sequence[float]) -> int:
        """Return how many of these scores differ from those of the first call."""
        first = [self.first[pair] for pair in pairs]
        return int((~np.isclose(first, scores, rtol=0, atol=NOISE, equal_nan=True)).sum())

    def unequal(self, calls: int) -> Fault | None:
        """Return a fault if one of several calls on the batch gives other scores than the first."""
        if count := max(self.changes() for _ in range(calls - 1)):
            evidence = f"{count} of {len(self.batch)} scores changed on a second call"
            return Fault(self._cause(), evidence)
        return None

    def _cause(self) -> str:
        """Return why scores differ: "random", "clock", or "state" (left by earlier calls)."""
        names = names_used(self.scorer.funcs[self.number])
        if CLOCK & names:
            return "clock"
        seeded = copy(self)
        seeded.first = dict(
            zip(self.batch, self.scorer.call(self.number, self.batch, seed="1"), strict=True)
        )
        differs, again = seeded.changes(seed="2"), seeded.changes(seed="1")
        if not again:
            return "random" if differs else "state"
        return "random" if RANDOM & names else "state"

    def compares(self) -> bool:
        """Return whether completions earn different scores in smaller batches.

        One batch has one completion of each row, each of a different kind; another has one alone.
        """
        rows = list(dict.fromkeys(row for row, _ in self.batch))
        groups = [[pair for pair in self.batch if pair[0] == row] for row in rows]
        apart = [group[kind % len(group)] for kind, group in enumerate(groups)]
        return any(self.changes(pairs) for pairs in (apart, apart[-1:]))


def repeatability(scorer: Scorer, number: int, batch: Sequence[Pair]) -> Fault | None:
    """Return a fault if the scores of a batch depend on anything but rows and completions.

    A reward that compares the completions of a batch, and has no other fault, is added to
    `scorer.grouped`, and its scores are forgotten. A slow reward is called as rarely as possible.

    Args:
        scorer: The rewards; the scores of their earlier calls are compared, too.
        number: The number of the reward.
        batch: Pairs, with those of the same row next to each other.

    Raises:
        Exception: Whatever the reward raises.
    """
    if isinstance(scorer.funcs[number], LLMJudge):
        return _of_judge(scorer, number, batch)
    size, is_slow = len(batch), scorer.is_slow(number)
    before, at_first = (scorer.scores(pairs)[:, number] for pairs in (batch, scorer.first))
    calls = Calls(scorer, number, batch)
    is_new = calls.differ(batch, before)
    is_called = not is_slow or is_new  # a time limit of its own, perhaps
    if is_called and (fault := calls.unequal(2 if is_slow else CALLS)):
        return fault
    if not is_slow:
        with _later():
            if count := calls.changes():
                return Fault("clock", f"{count} of {size} scores change with the time of day")
        if count := calls.changes(batch[::-1]):
            if scorer.takes_groups(number, batch):
                scorer.forget(number)
                return None
            return Fault("order", f"{count} of {size} scores changed when the batch was reordered")
    if calls.compares():
        if fault := calls.unequal(CALLS):
            return fault
        scorer.grouped.add(number)
        scorer.forget(number)
    elif not is_slow and is_new:
        return Fault("state", f"{is_new} of {size} scores changed after the first call")
    if not scorer.failed.isdisjoint(scorer.first):
        return None
    count = Calls(scorer, number, scorer.first).differ(scorer.first, at_first)
    evidence = f"{count} of {len(scorer.first)} scores changed after the first calls"
    return Fault("state", evidence) if count else None


def _of_judge(scorer: Scorer, number: int, batch: Sequence[Pair]) -> Fault | None:
    """Return a fault if a judge gives clearly different grades when it is asked again.

    The judge is asked without its cache. A `GroupJudge` is also asked in the opposite order.
    """
    judge, other = scorer.funcs[number], copy(scorer)
    changes = {"random": {"cache": False}}
    changes |= {"order": {"reverse": not judge.reverse}} if isinstance(judge, GroupJudge) else {}
    first = np.array(scorer.call(number, batch))
    for rule, change in changes.items():
        other.funcs = [replace(judge, **change) if f is judge else f for f in scorer.funcs]
        if count := int((np.abs(first - other.call(number, batch)) > MARGIN).sum()):
            evidence = f"{count} of {len(batch)} grades differ by more than {MARGIN} ({change})"
            return Fault(rule, evidence)
    return None


@contextmanager
def _later() -> Iterator[None]:
    """Set the clocks of the module `time` forward."""
    clocks = {name: getattr(time, name) for name in ("time", "monotonic", "perf_counter")}
    try:
        for name, now in clocks.items():
            setattr(time, name, lambda now=now: now() + LATER)
        yield
    finally:
        for name, now in clocks.items():
            setattr(time, name, now)


def side_effects(scorer: Scorer, number: int, batch: Sequence[Pair]) -> list[str]:
    """Return what a reward changes in the process and in its arguments, as phrases.

    The reward is called directly, because `run` would undo its changes.
    """
    effects, states = [], []
    with kept(), silent():
        for seed in (1, 2):
            generators = _generators(seed)
            arguments = scorer.arguments(number, batch)
            original = {name: deepcopy(v) for name, v in arguments.items() if isinstance(v, list)}
            folder = Path.cwd()
            result = scorer.funcs[number](**arguments)
            if hasattr(result, "__await__"):
                result.close()  # it was not started, so it has changed nothing
            if Path.cwd() != folder:
                effects.append("it changes the working directory")
                os.chdir(folder)
            states.append({name: state() for name, state in generators.items()})
            effects += [f"it changes `{n}`" for n, v in original.items() if v != arguments[n]]
    names = [name for name, state in states[0].items() if state == states[1].get(name)]
    return list(dict.fromkeys([*effects, *(f"it seeds {name}" for name in names)]))


def _generators(seed: int) -> dict[str, Callable[[], Any]]:
    """Seed the global generators, and return functions that read their states."""
    random.seed(seed)
    states: dict[str, Callable[[], Any]] = {"random": random.getstate}
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
        states["numpy"] = lambda: numpy.random.get_state()[1].tobytes()
    if torch := sys.modules.get("torch"):
        torch.default_generator.manual_seed(seed)
        states["torch"] = lambda: torch.default_generator.get_state().numpy().tobytes()
    return states


def growth(
    scorer: Scorer, number: int, row: int, longest: int, writers: Sequence[Callable[[str], str]]
) -> Fault | None:
    """Return a fault if the reward takes too long on a completion of at most `longest` characters.

    Texts are made longer only while the shorter ones are quick, so that even a reward that would
    never end on a long text is found in time.

    Args:
        scorer: The rewards.
        number: The number of the reward.
        row: The number of the row whose columns the reward gets.
        longest: The largest length of a completion [characters].
        writers: Functions that write a text into a completion, such as the form's.
    """
    if number in scorer.faults and scorer.faults[number].rule == "slow":  # on the first texts
        return Fault("hangs", scorer.faults.pop(number).evidence)
    if isinstance(scorer.funcs[number], LLMJudge):
        return None
    cases = [(begin, unit, write) for write in writers for begin, unit in STRESS]
    before = scorer.seconds[number], scorer.calls[number]
    fault = _growth(scorer, number, row, longest, cases)
    if fault is None:  # then these texts are no sign of how long others take
        scorer.seconds[number], scorer.calls[number] = before
    return fault


def _growth(
    scorer: Scorer, number: int, row: int, longest: int, cases: Sequence[tuple]
) -> Fault | None:
    """Try texts of growing length, as `growth` describes."""
    start = clock()

    def seconds(choice: Sequence[tuple], repeats: int, limit: float = LIMIT) -> float:
        """Return how long the reward takes for some of the cases, in one batch."""
        texts = [write((begin + unit * repeats)[:longest]) for begin, unit, write in choice]
        return _seconds(scorer, number, [(row, text) for text in texts], limit)

    for repeats in REPEATS:
        if clock() - start > ALL:
            break
        if seconds(cases, repeats) < SLOW:
            continue
        for case in cases:
            if seconds([case], repeats) >= SLOW:
                is_steep = repeats <= FEW or seconds([case], repeats // 2) < SLOW / STEEP
                is_endless = is_steep and seconds([case], max(repeats, FEW), HANGS) == np.inf
                text = case[2]((case[0] + case[1] * repeats)[:longest])
                takes = f"more than {SLOW:g} s for one completion of {len(text):,} characters"
                evidence = f"{takes}: {cut(text, 80)}"
                return Fault("hangs" if is_endless else "slow", evidence)
    return None


def tower(scorer: Scorer, number: int, row: int, write: Callable[[str], str]) -> Fault | None:
    """Return a fault if the reward computes powers of any size that a completion asks for."""
    small, large = ([(row, write(text))] for text in ("7**2", "7**300000"))
    if _seconds(scorer, number, large) < TOWER:
        return None
    base, duration = (min(_seconds(scorer, number, p) for _ in range(3)) for p in (small, large))
    if duration < TOWER or duration < 20 * base:
        return None
    return Fault("hangs", "it computes 7**300000 as an answer, so 9**9**9 would never end")


@contextmanager
def spied(mark: str) -> Iterator[list[str]]:
    """Yield a list of the texts with the mark that code passes to `eval`; none is evaluated."""
    real, texts = builtins.eval, []

    def spy(source: Any, *scopes: Any) -> Any:
        if mark in str(source):
            texts.append(str(source))
            raise ValueError("not evaluated")
        caller = sys._getframe(1)
        return real(source, *(scopes or (caller.f_globals, caller.f_locals)))

    builtins.eval = spy
    try:
        yield texts
    finally:
        builtins.eval = real


def evaluated(scorer: Scorer, number: int, row: int, answer: str, write: Callable) -> Fault | None:
    """Return a fault if the reward passes a power of any size to Python's `eval`.

    A reward may evaluate only expressions with the row's numbers. The right answer is therefore
    tried with `**` in place of its operators, too.
    """
    if "eval" not in names_used(scorer.funcs[number]):
        return None
    sign = r" *[-+*/x×÷] *(?=[\d(])"
    same_numbers, same_length = (re.sub(f"{digit}{sign}", "**", answer) for digit in ("", r"\d"))
    with spied("**") as sources:
        for text in (same_numbers, same_length, "9**9**9", "9**9**9=1", "9**9**9 = 1"):
            with suppress(Exception):  # the spy's own, or what other attacks find as well
                scorer.call(number, [(row, write(text))])
    if not sources:
        return None
    evidence = f"`eval` gets {sources[0][:60]!r} from a completion, and so 9**9**9"
    return Fault("hangs", f"{evidence}, which never ends")


def _seconds(scorer: Scorer, number: int, pairs: Sequence[Pair], limit: float = LIMIT) -> float:
    """Return the seconds that a reward takes for a batch; infinity if it is stopped.

    A call that was late because other processes had the processor is repeated, but only if it has
    the usual limit.
    """
    start = clock()
    try:
        scorer.call(number, pairs, limit=limit, patient=limit == LIMIT)
    except TookTooLong:
        return np.inf
    except Exception:  # of a user's reward: what it raises on is found, and recorded
        scorer.safe(number, pairs)
    return clock() - start
