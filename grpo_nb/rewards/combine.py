"""Rewards made of rewards: gated, weighted, and with weights that move.

Parts may be any TRL-shaped functions; a combination is async if one of its parts is.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_nb.rewards.contract import Reward, Scores, declared_range

BatchReward = Callable[..., Any]


def is_async(reward: BatchReward) -> bool:
    """Whether TRL has to await it: an async function, or an object with an async call."""
    call = getattr(reward, "__call__", None)  # noqa: B004 (its kind is asked, not its presence)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


def waits(reward: BatchReward) -> bool:
    """Whether its time passes in other processes, and it may run in a thread meanwhile.

    `@reward(parallel=True)` says both; a function from elsewhere may count on its turn.
    """
    if is_async(reward):
        return False
    parts = reward.parts if isinstance(reward, Combined) else [reward]
    ours = all(isinstance(part, Reward) for part in parts)
    return ours and any(part.settings.parallel for part in parts)


def in_thread(reward: BatchReward) -> BatchReward:
    """The reward as an async one: TRL runs those together, and the others one after another."""

    async def call(**columns: Any) -> Any:
        return await asyncio.to_thread(reward, **columns)

    call.__name__ = reward.__name__
    return call


@dataclass(eq=False)
class Combined:
    """Parts, and the function that makes one score of a completion's scores.

    `join(scores, **options)` takes one score a part; a None among them makes None.
    """

    name: str  # its `__name__`
    parts: list[BatchReward]
    join: Callable[..., float]
    range: tuple[float, float]
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self.__name__ = self.name
        self.columns = sorted({c for part in self.parts for c in getattr(part, "columns", ())})
        self.__doc__ = f"{self.join.__doc__} Of: {', '.join(p.__name__ for p in self.parts)}."

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        return self._join([part(completions=completions, **columns) for part in self.parts])

    def _join(self, columns_F_N: list[Scores]) -> Scores:
        rows = zip(*columns_F_N, strict=True)
        return [None if None in row else self.join(row, **self.options) for row in rows]


class AsyncCombined(Combined):
    """The same with a part that has to be awaited; its parts run together."""

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        async def run(part: BatchReward) -> Scores:
            ready = in_thread(part) if waits(part) else part
            scores = ready(completions=completions, **columns)
            return await scores if inspect.isawaitable(scores) else scores

        return self._join(list(await asyncio.gather(*map(run, self.parts))))


def gated(reward: BatchReward, *, by: BatchReward, mark: float = 1.0, name: str = "") -> Combined:
    """`reward` where `by` scores at least `mark`, else the least score of `reward`.

    Unlike a sum, it pays nothing for a right answer in the wrong format, or the reverse.
    """
    kind = AsyncCombined if is_async(reward) or is_async(by) else Combined
    name, score_range = name or f"{reward.__name__}_gated_by_{by.__name__}", declared_range(reward)
    return kind(name, [reward, by], _gate, score_range, {"low": score_range[0], "mark": mark})


def _gate(row: Sequence[float], low: float, mark: float) -> float:
    """The first part, where the gate reaches its mark; else the least score."""
    return row[0] if row[1] >= mark else low


def weighted(parts: Sequence[tuple[BatchReward, float]], *, name: str = "weighted") -> Combined:
    """One reward that is the weighted sum of others."""
    rewards, weights = [reward for reward, _ in parts], [weight for _, weight in parts]
    ends = [sorted(end * weight for end in declared_range(part)) for part, weight in parts]
    score_range = (sum(low for low, _ in ends), sum(high for _, high in ends))
    kind = AsyncCombined if any(map(is_async, rewards)) else Combined
    return kind(name, rewards, _weigh, score_range, {"weights": weights})


def _weigh(row: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted sum."""
    return sum(score * weight for score, weight in zip(row, weights, strict=True))


@dataclass(eq=False)
class Scaled:
    """A reward times a factor that moves with the step; the base of the two below."""

    reward: BatchReward

    def __post_init__(self) -> None:
        name, (low, high) = self.reward.__name__, declared_range(self.reward)
        if is_async(self.reward):
            raise ValueError(f"{name} is async: give it a fixed reward_weights entry")
        self.__name__, self.__doc__ = name, self.reward.__doc__
        self.columns = getattr(self.reward, "columns", [])
        self.range = (min(0.0, low * self.greatest), max(0.0, high * self.greatest))

    def __call__(self, completions: Sequence[Any], trainer_state: Any = None, **columns) -> Scores:
        if trainer_state is not None:
            columns["trainer_state"] = trainer_state
        scores = self.reward(completions=completions, **columns)
        # Outside a training, as in a validation, no step is counted and no factor moves. Nor could
        # it where several processes train, of which only the first validates.
        training = getattr(trainer_state, "is_training", True)
        step = getattr(trainer_state, "global_step", -1) if training else -1
        factor = self.factor(step, scores)
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/factor", factor)
        return [None if score is None else score * factor for score in scores]


@dataclass(eq=False)
class Scheduled(Scaled):
    """A reward whose factor is drawn through points: {0: 0.2, 100: 1.0} rises for 100 steps."""

    points: dict[int, float]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError("a schedule needs at least one point, such as {0: 1.0}")
        self.points = dict(sorted(self.points.items()))
        self.greatest = max(self.points.values())
        super().__post_init__()

    def factor(self, step: int, scores: Scores) -> float:
        import numpy as np

        return float(np.interp(step, list(self.points), list(self.points.values())))


@dataclass(eq=False)
class Adaptive(Scaled):
    """A reward whose factor rises while it is seldom earned, and falls once it mostly is.

    A success is a score at or above the middle of the reward's range. The factor moves once a
    step, however often the reward is called in it, and `save`/`load` keep it with a checkpoint.
    """

    low: float = 0.2  # success rate under which the factor grows
    high: float = 0.8  # success rate over which it shrinks
    change: float = 1.05  # by how much a step multiplies or divides it
    least: float = 0.25  # its lower bound
    greatest: float = 4.0  # its upper bound

    def __post_init__(self) -> None:
        super().__post_init__()
        self.value, self.step = 1.0, -1
        self.everyones: Callable[[list[float]], list[float]] = list  # of all processes' scores

    def factor(self, step: int, scores: Scores) -> float:
        middle = sum(declared_range(self.reward)) / 2
        if step <= self.step:
            return self.value
        if known := self.everyones([score for score in scores if score is not None]):
            self.step = step
            rate = sum(score >= middle for score in known) / len(known)
            power = (rate < self.low) - (rate > self.high)
            self.value = min(self.greatest, max(self.least, self.value * self.change**power))
        return self.value

    def save(self, folder: Path) -> None:
        state = {"value": self.value, "step": self.step}
        (folder / f"{self.__name__}.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        state = json.loads((folder / f"{self.__name__}.json").read_text(encoding="utf-8"))
        self.value, self.step = state["value"], state["step"]
