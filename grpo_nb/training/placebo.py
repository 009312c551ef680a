"""What a control of a run is paid for (`train.control`), instead of for its answers.

"shuffled" deals the scores of a group out to its completions at random: the same scores, with no
relation to what they are paid for. "format-only" pays the rewards of format alone. All else is
the run's, the validation too, which scores with the true rewards and chooses the adapter.

A weight that moves (`rewards.Adaptive`) moves by the true scores, which are shuffled after it.
TRL would add an environment's `get_reward` as a reward of its own, with weight 1, which no setting
reaches; `environments` hides it, so that it is paid by `environment_reward`, as any other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb.rewards import Adaptive, RewardSet, gated

if TYPE_CHECKING:
    import torch


def paid_weights(rewards: RewardSet, control: str) -> list[float]:
    """The weights that a training pays by.

    Args:
        rewards: The run's set.
        control: As `train.control` has it.

    Raises:
        ValueError: The format alone is to be paid, and the set pays nothing for it, or
            nothing else.

    >>> from grpo_nb.rewards import load_preset
    >>> paid_weights(load_preset("math"), "format-only")
    [0.0, 0.25, 0.25, 0.0]
    """
    if control != "format-only":
        return list(rewards.reward_weights)
    named = zip(rewards.names, rewards.reward_funcs, rewards.reward_weights, strict=True)
    # What a format gates may be the answer.
    weights = [w if "_format_" in n and not is_gated(f) else 0.0 for n, f, w in named]
    if any(weights) and weights != list(rewards.reward_weights):
        return weights
    share = "all that is paid" if any(weights) else "none that is paid"
    raise ValueError(
        f"train.control = 'format-only': of the rewards {', '.join(rewards.names)} {share} is of "
        "format (those with _format_ in their names, and not gated): take the control 'shuffled'"
    )


def is_gated(func: Callable[..., Any]) -> bool:
    """Whether a reward, or the one whose weight moves, is paid behind another."""
    return isinstance(func.reward if isinstance(func, Adaptive) else func, gated)


def shuffled(rewards_N_F: "torch.Tensor", group: int, seed: int, step: int) -> "torch.Tensor":
    """The rewards of each group, dealt out anew among its completions.

    A completion's rewards stay together, so that each reward and the total have the scores that
    they had, group by group. Every order is as likely as any other, the old one included: what a
    completion is paid is, on average, its group's mean.

    Args:
        rewards_N_F: Of completions, group after group, of all processes.
        group: Completions in each.
        seed: Of the training.
        step: That is being trained. A resumed training and every process draw the same order.
    """
    rows_P_G = np.arange(len(rewards_N_F)).reshape(-1, group)
    order_P_G = np.random.default_rng([seed, step]).permuted(rows_P_G, axis=1)
    return rewards_N_F[order_P_G.ravel().tolist()]
