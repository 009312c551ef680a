"""Gate one reward by another, and tell which rewards wait for other processes."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

from grpo_nb.rewards.contract import Reward, Scores, declared_range

BatchReward = Callable[..., Any]


def is_async(reward: BatchReward) -> bool:
    """Return whether TRL must await a reward, because it or its `__call__` is an async function."""
    call = getattr(reward, "__call__", None)  # noqa: B004 (its kind matters, not its presence)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


def waits(reward: BatchReward) -> bool:
    """Return whether a reward mostly waits for other processes, so that it may run in a thread.

    Such a reward is declared by `@reward(parallel=True)`. Any other may rely on running alone.
    """
    parts = getattr(reward, "parts", [reward])
    ours = all(isinstance(part, Reward) for part in parts)
    return ours and any(part.settings.parallel for part in parts)


def in_thread(reward: BatchReward) -> BatchReward:
    """Return an async function that calls the reward in a thread.

    TRL runs only async rewards concurrently.
    """

    async def call(**columns: Any) -> Any:
        return await asyncio.to_thread(reward, **columns)

    call.__name__ = reward.__name__
    return call


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
        if async_names := [part.__name__ for part in self.parts if is_async(part)]:
            raise ValueError(
                f"{async_names[0]} is async, which gated() cannot take: write one `async def` "
                "reward that awaits both and returns the lowest score where the gate is closed"
            )
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
