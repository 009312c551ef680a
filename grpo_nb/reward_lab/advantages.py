"""Weighted totals and group advantages, computed as TRL computes them.

The arithmetic is that of trl.GRPOTrainer (1.15), including the treatment of None and NaN. In TRL,
`loss_type` does not change advantages; it only decides how an advantage is distributed over the
tokens of a completion. Unsloth on a GPU differs: with `loss_type="dr_grpo"` it does not scale
advantages (`effective_scaling`).
"""

import warnings
from collections.abc import Sequence

import numpy as np

EPSILON = 1e-4  # added to standard deviations, as in TRL


def weighted_totals(scores: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum of each completion's scores.

    Args:
        scores: Scores, [completions, rewards]; NaN where a reward returned None.
        weights: Weights, [rewards].

    Returns:
        Totals, [completions]. None counts as 0; the total is NaN if no reward gave a score.
    """
    totals = np.nan_to_num(scores * np.asarray(weights)).sum(axis=1)
    return np.where(np.isnan(scores).all(axis=1), np.nan, totals)


def effective_scaling(scale_rewards: str, loss_type: str, unsloth_on_gpu: bool) -> str:
    """Return the value of `scale_rewards` that takes effect.

    >>> effective_scaling("group", "dr_grpo", unsloth_on_gpu=True)
    'none'
    """
    return "none" if loss_type == "dr_grpo" and unsloth_on_gpu else scale_rewards


def advantages(
    scores: np.ndarray,
    weights: Sequence[float],
    num_generations: int,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> np.ndarray:
    """Return the advantage of each completion within its group.

    Args:
        scores: Scores, [completions, rewards], with the completions of a group in consecutive
            rows; NaN for None.
        weights: Weights, [rewards].
        num_generations: Group size.
        scale_rewards: Divide by the standard deviation (with Bessel's correction) of the "group"
            or the "batch", or by nothing ("none").
        multi_objective_aggregation: "sum_then_normalize", or "normalize_then_sum", which
            normalizes each reward within its group, then normalizes their weighted sum over the
            batch, and ignores `scale_rewards`.

    Returns:
        Advantages, [completions]; 0 where no reward gave a score.

    Raises:
        ValueError: The number of completions is not a multiple of the group size.

    Source: trl.GRPOTrainer; Shao et al. 2024, https://arxiv.org/abs/2402.03300; GDPO (for
        normalize_then_sum), https://huggingface.co/papers/2601.05242.

    >>> advantages(np.array([[1.0], [0.0], [1.0], [1.0]]), [1.0], 2).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    if len(scores) % num_generations:
        raise ValueError(f"{len(scores)} completions do not make groups of {num_generations}")
    with warnings.catch_warnings(action="ignore"):  # numpy warns about groups without any score
        if multi_objective_aggregation == "normalize_then_sum":
            grouped = scores.reshape(-1, num_generations, scores.shape[1])
            each = np.nan_to_num(_centered(grouped, 1) / (_std(grouped, 1) + EPSILON))
            each = np.where(np.isnan(scores), np.nan, each.reshape(scores.shape))
            totals = weighted_totals(each, weights)
            return np.nan_to_num(_centered(totals, 0) / (_std(totals, 0) + EPSILON))
        totals = weighted_totals(scores, weights)
        groups = totals.reshape(-1, num_generations)
        spread = {"group": _std(groups, 1), "batch": _std(totals, 0)}.get(scale_rewards)
        scaled = _centered(groups, 1) / (1 if spread is None else spread + EPSILON)
        return np.nan_to_num(scaled).reshape(-1)


def _centered(values: np.ndarray, axis: int) -> np.ndarray:
    return values - np.nanmean(values, axis=axis, keepdims=True)


def _std(values: np.ndarray, axis: int) -> np.ndarray:
    return np.nanstd(values, axis=axis, ddof=1, keepdims=True)  # NaN for fewer than two values
