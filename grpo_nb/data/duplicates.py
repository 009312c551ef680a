"""The same question twice: exactly, nearly, or with another gold. Hashes only, no texts kept.

Near-duplicates have the same numbers and share most of their runs of three words, by MinHash:
"What is 47 + 38?" and "What is 47 + 39?" are two problems, however alike they read.
"""

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_nb.data.validate import Checked
from grpo_nb.prompts import Message, split_words

PERMUTATIONS, BANDS = 32, 8  # of MinHash: rows 70 % alike meet in some band in 9 of 10 cases
ALIKE = 0.7  # share of equal MinHashes from which two rows count as near-duplicates
_MIX = np.uint64(0x9E3779B97F4A7C15)


def fingerprints(checked: Sequence[Checked]) -> pd.DataFrame:
    """What is compared of each row: hashes of question, gold and numbers, and its MinHashes."""
    from rensa import RMinHash

    keys = [_key(one.row["prompt"]) for one in checked]
    matrix = RMinHash.digest_matrix_from_token_sets(map(_runs, keys), PERMUTATIONS, 0)
    hashes = {
        "row": [one.number for one in checked],
        "question": map(hash, keys),
        "gold": [hash(one.gold) for one in checked],
        "numbers": [hash(tuple(sorted(re.findall(r"\d+", key)))) for key in keys],
    }
    minhashes = np.array(matrix.to_rows(), dtype=np.uint32).reshape(-1, PERMUTATIONS)
    return pd.DataFrame(hashes, dtype=np.int64).join(pd.DataFrame(minhashes))


def _key(prompt: Sequence[Message]) -> str:
    """All turns but the system's, whatever their case and spacing."""
    turns = (turn["content"] for turn in prompt if turn["role"] != "system")
    return " ".join(" ".join(turns).casefold().split())


def _runs(text: str) -> list[str]:
    words = split_words(text)
    return [" ".join(words[i : i + 3]) for i in range(len(words) - 2)] or [text]


def near_groups(seen: pd.DataFrame) -> np.ndarray:
    """For each row the first row of its group of near-duplicates; itself where it is alone.

    Args:
        seen: What `fingerprints` gave.
    """
    minhashes = seen[list(range(PERMUTATIONS))].to_numpy()
    labels = np.arange(len(seen))
    pairs = []
    for band in np.split(minhashes, BANDS, axis=1):
        keys = seen["numbers"].to_numpy().astype(np.uint64)
        for column in band.T:
            keys = (keys ^ column) * _MIX
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        rows = np.flatnonzero(first[group] < labels)
        met = first[group][rows]
        alike = (minhashes[rows] == minhashes[met]).mean(axis=1) >= ALIKE
        pairs.append((rows[alike], met[alike]))
    left, right = np.concatenate(pairs, axis=1)
    while (labels[left] != labels[right]).any():  # lowered until both ends of a pair agree
        lower = np.minimum(labels[left], labels[right])
        np.minimum.at(labels, left, lower)
        np.minimum.at(labels, right, lower)
    return labels
