"""Combine rewards in TRL's shape: gate one by another, or adapt a weight during training."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from grpo_nb.rewards.contract import Scores, declared_range

BatchReward = Callable[..., Any]


def is_async(reward: BatchReward) -> bool:
    """Return whether TRL must await a reward, because it or its `__call__` is an async function."""
    call = getattr(reward, "__call__", None)  # noqa: B004 (its kind matters, not its presence)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


@dataclass(eq=False)
class gated:
    """Pay the score of `reward` if `by` scores at least `mark`, else the minimum of `reward`.

    Unlike a sum, a gate pays nothing for a right answer in the wrong format, or for a wrong answer
    in the right format. If either reward gives None, so does the gate.

    Raises:
        ValueError: One of the two rewards is async.
    """

    reward: BatchReward
    _: KW_ONLY
    by: BatchReward
    mark: float = 1.0
    name: str = ""  # the gate's `__name__`; by default it is built from both names

    def __post_init__(self) -> None:
        self.parts = [self.reward, self.by]
        names = [part.__name__ for part in self.parts]
        if any(map(is_async, self.parts)):
            raise ValueError("gated() takes no async reward: write one that awaits both parts")
        self.__name__ = self.name or "_gated_by_".join(names)
        self.__doc__ = f"{names[0]} where {names[1]} gives {self.mark:g}."
        self.range = declared_range(self.reward)
        self.columns = sorted({c for part in self.parts for c in getattr(part, "columns", ())})

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        scores, gates = (part(completions=completions, **columns) for part in self.parts)
        return [
            None if score is None or gate is None else score if gate >= self.mark else self.range[0]
            for score, gate in zip(scores, gates, strict=True)
        ]


@dataclass(eq=False)
class Adaptive:
    """Multiply a reward by a factor that rises if successes are rare and falls if they are common.

    A success is a score at or above the middle of the reward's range. The factor changes at most
    once per step, however often the reward is called. Checkpoints hold `value` and `step`.
    """

    reward: BatchReward
    low: float = 0.2  # success rate below which the factor rises
    high: float = 0.8  # success rate above which the factor falls
    change: float = 1.05  # a step multiplies or divides the factor by this
    least: float = 0.25  # lower bound of the factor
    greatest: float = 4.0  # upper bound of the factor

    def __post_init__(self) -> None:
        name, (low, high) = self.reward.__name__, declared_range(self.reward)
        if is_async(self.reward):
            raise ValueError(f"Adaptive cannot wrap {name}, which is async: give it a fixed weight")
        self.__name__, self.__doc__ = name, self.reward.__doc__
        self.columns = getattr(self.reward, "columns", [])
        self.range = (min(0.0, low * self.greatest), max(0.0, high * self.greatest))
        self.value, self.step = 1.0, -1
        self.gather_scores: Callable[[list[float]], list[float]] = list  # the trainer replaces it

    def __call__(self, completions: Sequence[Any], trainer_state: Any = None, **columns) -> Scores:
        if trainer_state is not None:
            columns["trainer_state"] = trainer_state
        scores = self.reward(completions=completions, **columns)
        # Outside training, no step is counted and the factor does not change. It must not change
        # during validation, because only the first of several processes validates.
        if getattr(trainer_state, "is_training", True):
            self._move(getattr(trainer_state, "global_step", -1), scores)
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/factor", self.value)
        return [None if score is None else score * self.value for score in scores]

    def _move(self, step: int, scores: Scores) -> None:
        middle = sum(declared_range(self.reward)) / 2
        if step <= self.step:
            return
        if numbers := self.gather_scores([score for score in scores if score is not None]):
            self.step = step
            rate = sum(score >= middle for score in numbers) / len(numbers)
            power = (rate < self.low) - (rate > self.high)
            self.value = min(self.greatest, max(self.least, self.value * self.change**power))
