"""What the optimizer makes of rewards: weighted totals and group advantages, as TRL's.

The arithmetic is that of trl.GRPOTrainer (1.15), None and NaN included. No `loss_type` of
TRL changes an advantage; they differ in how a completion's tokens share it. Unsloth on a GPU
does change it: under `loss_type="dr_grpo"` it turns the scaling off (`effective_scaling`).
"""

import warnings
from collections.abc import Sequence

import numpy as np

EPSILON = 1e-4  # TRL's, added to a standard deviation


def weighted_totals(scores: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Weighted sum of each completion's scores.

    Args:
        scores: [completions, rewards], NaN where a reward gave None.
        weights: [rewards].

    Returns:
        [completions]; None counts 0, and a completion that no reward scored is NaN.
    """
    totals = np.nansum(scores * np.asarray(weights), axis=1)
    return np.where(np.isnan(scores).all(axis=1), np.nan, totals)


def effective_scaling(scale_rewards: str, loss_type: str, unsloth_on_gpu: bool) -> str:
    """The `scale_rewards` that takes effect.

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
    """Advantage of each completion within its group.

    Args:
        scores: [completions, rewards], groups one after another, NaN for None.
        weights: [rewards].
        num_generations: Size of a group.
        scale_rewards: "group" or "batch" divides by that standard deviation (with
            Bessel's correction), "none" by nothing.
        multi_objective_aggregation: "sum_then_normalize", or "normalize_then_sum", which
            scales each reward in its group, then their sum over the batch, and passes over
            scale_rewards.

    Returns:
        [completions]; 0 where no reward gave a score.

    Raises:
        ValueError: The completions do not make whole groups.

    Source: trl.GRPOTrainer; Shao et al. 2024, https://arxiv.org/abs/2402.03300; for
        normalize_then_sum GDPO, https://huggingface.co/papers/2601.05242.

    >>> advantages(np.array([[1.0], [0.0], [1.0], [1.0]]), [1.0], 2).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    if len(scores) % num_generations:
        raise ValueError(f"{len(scores)} completions do not make groups of {num_generations}")
    with warnings.catch_warnings(action="ignore"):  # of groups in which nothing was scored
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
    return np.nanstd(values, axis=axis, ddof=1, keepdims=True)  # NaN of fewer than two
