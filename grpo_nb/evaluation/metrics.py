"""What each model scored on each prompt, and how wide a range each figure has."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_nb.reward_lab.intervals import pass_at_k
from grpo_nb.rewards import RewardSet, declared_range


def majority(answers: Sequence[str | None]) -> int:
    """Place of the first sample that gives the most frequent answer; ties go to the first seen.

    Samples without an answer do not vote.

    >>> majority(["7", None, "8", None, "8"]), majority(["7", "8"]), majority([None])
    (2, 0, 0)
    """
    votes = Counter(answer for answer in answers if isinstance(answer, str))
    return list(answers).index(votes.most_common(1)[0][0]) if votes else 0


def per_prompt(lines: pd.DataFrame, preset: RewardSet) -> pd.DataFrame:
    """Every figure of every prompt, [prompts, figures], of one model and one decoding.

    Args:
        lines: What `evaluate_model` gave, of one decoding.

    Returns:
        accuracy, format, reward, each reward, tokens and truncated (means over the samples of
        the prompt), pass@1 … pass@k and majority@k; with one sample only pass@1 of these.
    """
    names = ["accuracy", "format", "reward", *preset.names, "tokens", "truncated"]
    by_row = lines.groupby("row", sort=True)
    table = by_row[names].mean().astype(float)
    right = np.stack([group.to_numpy() for _, group in by_row["correct"]])
    samples = right.shape[1]
    for k in range(1, samples + 1):
        table[f"pass@{k}"] = pass_at_k(right, k)
    if samples > 1:
        chosen = [majority(group.to_list()) for _, group in by_row["answer"]]
        table[f"majority@{samples}"] = right[np.arange(len(right)), chosen].astype(float)
    return table


def right(figures: pd.DataFrame) -> np.ndarray:
    """Whether each prompt counts as solved: its one answer, or the majority of its samples."""
    return figures[figures.columns[-1]].to_numpy() == 1.0


def ranges(figures: pd.DataFrame, preset: RewardSet) -> np.ndarray:
    """Least and greatest value of each figure, [2, figures]; NaN for lengths, which have none."""
    known = {func.__name__: declared_range(func) for func in preset.reward_funcs}
    known |= {"tokens": (np.nan, np.nan), "accuracy": known[preset.names[0]]}
    weighed = [
        sorted((weight * low, weight * high))
        for weight, (low, high) in zip(
            preset.reward_weights, map(declared_range, preset.reward_funcs), strict=True
        )
    ]
    known["reward"] = tuple(np.sum(weighed, axis=0))
    known["format"] = known.get(preset.format_name, (np.nan, np.nan))
    ends = np.array([known.get(name, (0.0, 1.0)) for name in figures], dtype=float).T
    return np.where(np.isfinite(ends), ends, np.nan)
