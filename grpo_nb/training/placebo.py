"""Reward a placebo run (`train.placebo`) for something other than its answers.

"shuffled" distributes the scores of a group at random over its completions, so that scores and
completions are unrelated. "format-only" uses only the rewards that pay for the form alone.
Everything else is as in the original run: validation still uses the true rewards, and chooses the
adapter.

An adaptive weight (`rewards.Adaptive`) follows the true scores, which are shuffled afterwards. TRL
would add an environment's `get_reward` as another reward, always with weight 1. Therefore
`environments` hides the method from TRL, and `environment_reward` is an ordinary reward that calls
it.
"""

from typing import TYPE_CHECKING

import numpy as np

from grpo_nb.rewards import RewardSet

if TYPE_CHECKING:
    import torch


def paid_weights(rewards: RewardSet, placebo: str) -> list[float]:
    """Return the reward weights that training uses.

    Args:
        rewards: The run's rewards.
        placebo: The value of `train.placebo`.

    Raises:
        ValueError: The placebo is "format-only", and the run uses no format reward, or no other.

    >>> from grpo_nb.rewards import load_preset
    >>> paid_weights(load_preset("math"), "format-only")
    [0.0, 0.25, 0.25, 0.0]
    """
    if placebo != "format-only":
        return list(rewards.reward_weights)
    formats = rewards.formats
    weights = [w if f.__name__ in formats else 0.0 for f, w in rewards.pairs]
    if any(weights) and weights != list(rewards.reward_weights):
        return weights
    share = "all" if any(weights) else "none"
    raise ValueError(
        f"train.placebo = 'format-only' pays only rewards for the form alone, which {share} "
        f"of {', '.join(rewards.names)} are: set train.placebo = 'shuffled'"
    )


def shuffled(rewards_N_F: "torch.Tensor", group: int, seed: int, step: int) -> "torch.Tensor":
    """Distribute the rewards of each group at random over its completions.

    The rewards of one completion stay together, so a group keeps its scores and its totals. Every
    order is equally likely, so on average a completion earns its group's mean.

    Args:
        rewards_N_F: Rewards of the completions of all processes, group after group.
        group: Completions per group.
        seed: The seed of the run.
        step: The current step; every process, and a resumed run, draws the same order for a step.
    """
    rows_P_G = np.arange(len(rewards_N_F)).reshape(-1, group)
    order_P_G = np.random.default_rng([seed, step]).permuted(rows_P_G, axis=1)
    return rewards_N_F[order_P_G.ravel().tolist()]
