"""Length rewards. They count tokens if TRL passes `completion_ids`, and otherwise words."""

import math
from collections.abc import Sequence

from grpo_nb.rewards.contract import Scored, reward

Ids = Sequence[int] | None


def _length(response: str, completion_ids: Ids) -> tuple[int, str]:
    if completion_ids is not None:
        return len(completion_ids), f"{len(completion_ids)} tokens"
    words = len(response.split())
    return words, f"{words} words"


@reward(resists="padding and truncation alike")
def ideal_length_reward(
    response: str, completion_ids: Ids = None, *, ideal: int = 100, tolerance: int = 50
) -> Scored:
    """Pay by the distance to the ideal length: 1 at 0, 0.61 at `tolerance`, 0.14 at twice that.

    The score falls along a bell curve.
    """
    length, unit = _length(response, completion_ids)
    return Scored(math.exp(-(((length - ideal) / tolerance) ** 2) / 2), unit)


@reward(resists="answers without reasoning")
def min_length_reward(response: str, completion_ids: Ids = None, *, minimum: int = 20) -> Scored:
    """Pay the length divided by the minimum, at most 1."""
    length, unit = _length(response, completion_ids)
    return Scored(min(1.0, length / minimum), unit)


@reward(low=-1.0, high=0.0, resists="padding")
def max_length_penalty(response: str, completion_ids: Ids = None, *, maximum: int = 512) -> Scored:
    """Take away the share by which the length exceeds the maximum, at most 1."""
    length, unit = _length(response, completion_ids)
    return Scored(-min(1.0, max(0.0, length / maximum - 1)), unit)
