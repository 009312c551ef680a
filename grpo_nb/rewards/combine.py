"""Rewards made of rewards: gated ones, and those with a weight that moves.

Parts may be any TRL-shaped functions; a gated reward is async if one of its parts is.
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
    parts = reward.parts if isinstance(reward, Gated) else [reward]
    ours = all(isinstance(part, Reward) for part in parts)
    return ours and any(part.settings.parallel for part in parts)


def in_thread(reward: BatchReward) -> BatchReward:
    """The reward as an async one: TRL runs those together, and the others one after another."""

    async def call(**columns: Any) -> Any:
        return await asyncio.to_thread(reward, **columns)

    call.__name__ = reward.__name__
    return call


@dataclass(eq=False)
class Gated:
    """`reward` where `by` gives at least `mark`, else its least score; None where either is."""

    reward: BatchReward
    by: BatchReward
    mark: float
    name: str  # its `__name__`

    def __post_init__(self) -> None:
        self.__name__, self.range = self.name, declared_range(self.reward)
        self.__doc__ = f"{self.reward.__name__} where {self.by.__name__} gives {self.mark:g}."
        self.parts = [self.reward, self.by]
        self.columns = sorted({c for part in self.parts for c in getattr(part, "columns", ())})

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        return self._gate(*[part(completions=completions, **columns) for part in self.parts])

    def _gate(self, scores: Scores, gates: Scores) -> Scores:
        return [
            None if score is None or gate is None else score if gate >= self.mark else self.range[0]
            for score, gate in zip(scores, gates, strict=True)
        ]


class AsyncGated(Gated):
    """The same with a part that has to be awaited; both run together."""

    async def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        async def run(part: BatchReward) -> Scores:
            ready = in_thread(part) if waits(part) else part
            scores = ready(completions=completions, **columns)
            return await scores if inspect.isawaitable(scores) else scores

        return self._gate(*await asyncio.gather(*map(run, self.parts)))


def gated(reward: BatchReward, *, by: BatchReward, mark: float = 1.0, name: str = "") -> Gated:
    """`reward` where `by` scores at least `mark`, else the least score of `reward`.

    Unlike a sum, it pays nothing for a right answer in the wrong format, or the reverse.
    """
    kind = AsyncGated if is_async(reward) or is_async(by) else Gated
    return kind(reward, by, mark, name or f"{reward.__name__}_gated_by_{by.__name__}")


@dataclass(eq=False)
class Adaptive:
    """A reward times a factor that rises while it is seldom earned, and falls once it mostly is.

    A success is a score at or above the middle of the reward's range. The factor moves once a
    step, however often the reward is called in it, and `save`/`load` keep it with a checkpoint.
    """

    reward: BatchReward
    low: float = 0.2  # success rate under which the factor grows
    high: float = 0.8  # success rate over which it shrinks
    change: float = 1.05  # by how much a step multiplies or divides it
    least: float = 0.25  # its lower bound
    greatest: float = 4.0  # its upper bound

    def __post_init__(self) -> None:
        name, (low, high) = self.reward.__name__, declared_range(self.reward)
        if is_async(self.reward):
            raise ValueError(f"{name} is async: give it a fixed reward_weights entry")
        self.__name__, self.__doc__ = name, self.reward.__doc__
        self.columns = getattr(self.reward, "columns", [])
        self.range = (min(0.0, low * self.greatest), max(0.0, high * self.greatest))
        self.value, self.step = 1.0, -1
        self.everyones: Callable[[list[float]], list[float]] = list  # of all processes' scores

    def __call__(self, completions: Sequence[Any], trainer_state: Any = None, **columns) -> Scores:
        if trainer_state is not None:
            columns["trainer_state"] = trainer_state
        scores = self.reward(completions=completions, **columns)
        # Outside a training, as in a validation, no step is counted and no factor moves. Nor could
        # it where several processes train, of which only the first validates.
        if getattr(trainer_state, "is_training", True):
            self._move(getattr(trainer_state, "global_step", -1), scores)
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/factor", self.value)
        return [None if score is None else score * self.value for score in scores]

    def _move(self, step: int, scores: Scores) -> None:
        middle = sum(declared_range(self.reward)) / 2
        if step <= self.step:
            return
        if known := self.everyones([score for score in scores if score is not None]):
            self.step = step
            rate = sum(score >= middle for score in known) / len(known)
            power = (rate < self.low) - (rate > self.high)
            self.value = min(self.greatest, max(self.least, self.value * self.change**power))

    def save(self, folder: Path) -> None:
        state = {"value": self.value, "step": self.step}
        (folder / f"{self.__name__}.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        state = json.loads((folder / f"{self.__name__}.json").read_text(encoding="utf-8"))
        self.value, self.step = state["value"], state["step"]
