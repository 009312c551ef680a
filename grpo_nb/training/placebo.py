"""Reward a placebo run for something other than its answers.

In any notebook: `GRPOTrainer(reward_funcs=placebo(reward_funcs, num_generations=8), …)`; in a run,
`train.placebo = "shuffled"`. The scores of a group are distributed at random over its completions,
so that scores and completions are unrelated; the gain of such a training is what sampling and
updating alone give. Everything else is as in the original run: a run's validation still uses the
true rewards, and chooses the adapter.

An adaptive weight (`rewards.Adaptive`) follows the true scores, which are shuffled afterwards. TRL
would add an environment's `get_reward` as another reward, unshuffled and always with weight 1.
Therefore `environments` hides the method from TRL, and `environment_reward` is an ordinary reward
that calls it.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from grpo_nb import ranks


def placebo(
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
    num_generations: int = 8,
    *,
    seed: int = 0,
) -> list[Callable[..., Any]]:
    """Return the same rewards, whose scores are shuffled within each group of completions.

    The scores of one completion stay together, so each group keeps its totals. Every order is
    equally likely, so on average a completion earns its group's mean.

    Args:
        reward_funcs: The rewards, as GRPOTrainer takes them.
        num_generations: The trainer's group size.
        seed: Seed of the orders.

    Raises:
        ValueError: A reward is a reward model instead of a function; or, in training, a batch does
            not hold whole groups.

    >>> paid = placebo(lambda completions, **kwargs: [1.0, 0.0, 3.0, 2.0], 2)
    >>> [sorted(pair) for pair in np.reshape(paid[0](completions=["a"] * 4), (2, 2)).tolist()]
    [[0.0, 1.0], [2.0, 3.0]]
    """
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    for func in funcs:
        if not callable(func) or hasattr(func, "parameters"):
            raise ValueError(f"{func!r:.80} is a reward model: write a function that calls it")
    return [_shuffling(func, num_generations, seed) for func in funcs]


def true_reward(func: Any) -> Any:
    """Return the reward that a placebo wraps; return any other reward unchanged."""
    return getattr(func, "pays_for", func)


def _shuffling(func: Callable[..., Any], group: int, seed: int) -> Callable[..., Any]:
    """Return one reward of `placebo`; all rewards of a `placebo` draw the same order in a batch."""

    def shuffle(scores: Sequence[Any], columns: dict[str, Any]) -> list[Any]:
        if len(scores) % group:
            raise ValueError(
                f"a batch of {len(scores)} completions holds no whole groups of {group}: give "
                "placebo() the trainer's num_generations; on several processes also make the "
                "completions of each a multiple of it"
            )
        prompts = list(columns.get("prompts") or ())
        starts = [n for n in range(len(prompts)) if n == 0 or prompts[n] != prompts[n - 1]]
        size = math.gcd(*starts, len(prompts))
        if size % group or (starts[1:] and size != group):
            raise ValueError(
                f"num_generations = {group}, but each prompt has {size} completions: give "
                f"placebo() the trainer's num_generations, {size}"
            )
        step = getattr(columns.get("trainer_state"), "global_step", 0)
        return [scores[place] for place in _order(len(scores), group, seed, step)]

    if inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__):

        async def payment(*args: Any, **columns: Any) -> list[Any]:
            return shuffle(await func(*args, **columns), columns)

    else:

        def payment(*args: Any, **columns: Any) -> list[Any]:
            return shuffle(func(*args, **columns), columns)

    payment = functools.wraps(func)(payment)
    payment.__name__ = getattr(func, "__name__", type(func).__name__)
    payment.pays_for = func
    return payment


def _order(count: int, group: int, seed: int, step: int) -> list[int]:
    """Return the places from which completions get their scores, drawn within each group.

    Every process draws the same order for the groups of all processes, and returns the part of the
    order that belongs to its own groups.
    """
    rows_P_G = np.arange(ranks.count() * count).reshape(-1, group)
    rows = np.random.default_rng([seed, step]).permuted(rows_P_G, axis=1).ravel()
    first = ranks.rank() * count
    return (rows[first : first + count] - first).tolist()
