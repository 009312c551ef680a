"""What the optimizer makes of rewards: weighted totals and group advantages, as TRL's."""

import numpy as np

EPSILON = 1e-4  # TRL's, added to the standard deviation


def weighted_totals(scores: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted sum of each completion's scores.

    Args:
        scores: [completions, rewards], NaN where a reward gave None.
        weights: [rewards].

    Returns:
        [completions]; None counts 0, and a completion that no reward scored is NaN.
    """
    totals = np.nansum(scores * weights, axis=1)
    return np.where(np.isnan(scores).all(axis=1), np.nan, totals)


def group_advantages(
    totals: np.ndarray, num_generations: int, scale_rewards: str = "group"
) -> np.ndarray:
    """Advantage of each completion within its group, as TRL's sum_then_normalize.

    Args:
        totals: [completions], groups one after another; NaN is left out and gets 0.
        num_generations: Size of a group.
        scale_rewards: "group" or "batch" divides by that standard deviation (with
            Bessel's correction), "none" by nothing.

    Returns:
        [completions].

    Source: trl.GRPOTrainer; Shao et al. 2024, https://arxiv.org/abs/2402.03300.

    >>> group_advantages(np.array([1.0, 0.0, 1.0, 1.0]), 2).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    if len(totals) % num_generations:
        raise ValueError(f"{len(totals)} completions do not make groups of {num_generations}")
    groups = totals.reshape(-1, num_generations)
    scored = ~np.isnan(groups)
    count = np.maximum(scored.sum(axis=1, keepdims=True), 1)
    centered = np.where(scored, groups - np.nansum(groups, axis=1, keepdims=True) / count, 0.0)
    if scale_rewards == "group":
        spread = np.sqrt((centered**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
        centered = centered / (spread + EPSILON)
    elif scale_rewards == "batch":
        centered = centered / (np.nanstd(totals, ddof=1) + EPSILON)
    return centered.reshape(-1)
