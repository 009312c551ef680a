"""Estimate figures and their uncertainty: pass@k, intervals, McNemar's test, Holm's correction."""

import math
import warnings

import numpy as np

LEVEL = 0.95
RESAMPLES = 2000
CHUNK = 100  # resamples computed at once, to limit memory


def bootstrap(values: np.ndarray, ends: np.ndarray, seed: int = 0) -> np.ndarray:
    """Return 95 % intervals of means, by the percentile bootstrap with two pseudo-prompts.

    One pseudo-prompt is added at each of `ends`. Without them, a model that solves all of 64
    prompts would get the interval 100 % … 100 %, and intervals would cover a true accuracy of 98 %
    in 72 % of the draws. With them, intervals of paired differences between accuracies of 30, 90
    and 98 % covered the truth in 94 to 97 % of 3,000 draws (n = 64 … 512), and in more draws if
    only a few prompts differ.

    Args:
        values: Figures of each prompt, [prompts, figures]; NaN is ignored. All columns are
            resampled together.
        ends: Values of the pseudo-prompts, [2, figures]: a figure's lowest and highest possible
            value, halved for a paired difference; NaN adds no pseudo-prompt.
        seed: The seed of the resampling.

    Returns:
        Lower and upper ends, [2, figures]; NaN for a figure without values.

    Source: Efron 1979; the pseudo-observations of Agresti and Coull 1998 and, for paired
    differences, Bonett and Price 2012, https://doi.org/10.3102/1076998611411915.
    """
    ends = np.where(np.isnan(values).all(axis=0), np.nan, ends)
    values = np.vstack([values[np.lexsort(values.T)], ends])  # the order of prompts does not matter
    present = (~np.isnan(values)).astype(float)
    numbers, count = np.nan_to_num(values), len(values)
    rng, means = np.random.default_rng(seed), []
    for _ in range(RESAMPLES // CHUNK):
        places = rng.integers(count, size=(CHUNK, count)) + count * np.arange(CHUNK)[:, None]
        times = np.bincount(places.ravel(), minlength=CHUNK * count).reshape(CHUNK, count)
        with np.errstate(invalid="ignore"):
            means.append((times @ numbers) / (times @ present))
    tail = (1 - LEVEL) / 2
    with warnings.catch_warnings(action="ignore"):  # numpy warns about a figure without values
        return np.nanquantile(np.concatenate(means), [tail, 1 - tail], axis=0)


def wilson(right: int, count: int) -> tuple[float, float]:
    """Return the 95 % interval of the share `right / count`.

    Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953.

    >>> [round(end, 3) for end in wilson(8, 10)]
    [0.49, 0.943]
    """
    square = 1.96**2
    middle = (right + square / 2) / (count + square)
    half = 1.96 * math.sqrt(right * (count - right) / count + square / 4) / (count + square)
    return middle - half, middle + half


def pass_at_k(passed_P_G: np.ndarray, k: int) -> np.ndarray:
    """Estimate the probability that at least one of k samples is correct, for each prompt.

    Args:
        passed_P_G: Whether each completion is correct, [prompts, group].
        k: Number of samples, at most the group size.

    Source: Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1 (unbiased).

    >>> pass_at_k(np.array([[True, False, False, False]]), 2)
    array([0.5])
    """
    group = passed_P_G.shape[1]
    chances = [1 - math.comb(wrong, k) / math.comb(group, k) for wrong in range(group + 1)]
    return np.array(chances)[group - passed_P_G.sum(axis=1)]


def mcnemar(gained: int, lost: int) -> float:
    """Return the exact two-sided p-value of McNemar's test on the prompts gained and lost.

    Args:
        gained: Number of prompts that only the second model answers correctly.
        lost: Number of prompts that only the first model answers correctly.

    Source: McNemar 1947, https://doi.org/10.1007/BF02295996, with the exact binomial.

    >>> mcnemar(6, 0), mcnemar(3, 3), mcnemar(0, 0)
    (0.03125, 1.0, 1.0)
    """
    total, tail, term = gained + lost, 0, 1
    for count in range(min(gained, lost) + 1):
        tail, term = tail + term, term * (total - count) // (count + 1)
    return min(1.0, 2 * tail / 2**total)


def holm(p: np.ndarray) -> np.ndarray:
    """Return p-values that are corrected for multiple comparisons.

    Source: Holm 1979, https://www.jstor.org/stable/4615733.

    >>> holm(np.array([0.01, 0.04, 0.03])).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    order = np.argsort(p)
    result = np.empty(len(p))
    result[order] = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)).clip(max=1.0)
    return result
