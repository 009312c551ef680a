"""The same question twice: exactly, nearly, or with another gold. Arrays only, no texts kept.

Near-duplicates have the same numbers and share most of their runs of three words, by MinHash:
"What is 47 + 38?" and "What is 47 + 39?" are two problems, however alike they read.
"""

import re
from collections.abc import Sequence

import numpy as np

from grpo_nb.prompts import Message, split_words

PERMUTATIONS, BANDS = 32, 8  # of MinHash: rows 70 % alike meet in some band in 9 of 10 cases
ALIKE = 0.7  # share of equal MinHashes from which two rows count as near-duplicates
_MIX = np.uint64(0x9E3779B97F4A7C15)


def question_key(prompt: Sequence[Message]) -> str:
    """All turns but the system's, whatever their case and spacing."""
    turns = (turn["content"] for turn in prompt if turn["role"] != "system")
    return " ".join(" ".join(turns).casefold().split())


def hashes(texts: Sequence[object]) -> np.ndarray:
    return np.fromiter(map(hash, texts), dtype=np.int64, count=len(texts))


def numbers_in(text: str) -> tuple[str, ...]:
    """Its numbers, in order of their digits.

    >>> numbers_in("what is 47 + 5?")
    ('47', '5')
    """
    return tuple(sorted(re.findall(r"\d+", text)))


def signatures(texts: Sequence[str]) -> np.ndarray:
    """MinHashes of the runs of three words, [texts, PERMUTATIONS]."""
    from rensa import RMinHash

    if not texts:
        return np.empty((0, PERMUTATIONS), dtype=np.uint32)
    runs = [_runs(text) for text in texts]
    matrix = RMinHash.digest_matrix_from_token_sets(runs, PERMUTATIONS, 0)
    return np.array(matrix.to_rows(), dtype=np.uint32)


def _runs(text: str) -> list[str]:
    words = split_words(text)
    return [" ".join(words[i : i + 3]) for i in range(len(words) - 2)] or [text]


def exact_duplicates(keys: np.ndarray, golds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(contradictory, repeated): masks over the rows.

    Args:
        keys: Hash of each row's question.
        golds: Hash of each row's gold.

    >>> contradictory, repeated = exact_duplicates(np.array([1, 1, 2, 2]), np.array([5, 5, 6, 7]))
    >>> contradictory.tolist(), repeated.tolist()
    ([False, False, True, True], [False, True, False, False])
    """
    _, first, group = np.unique(keys, return_index=True, return_inverse=True)
    disputed = np.zeros(len(first), dtype=bool)
    disputed[group[golds != golds[first][group]]] = True
    contradictory = disputed[group]
    return contradictory, ~contradictory & (np.arange(len(keys)) != first[group])


def near_groups(signature: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """For each row the first row of its group of near-duplicates; itself where it is alone.

    Args:
        signature: MinHashes, [rows, PERMUTATIONS].
        numbers: Hash of the numbers in each row.
    """
    everything = np.arange(len(signature))
    pairs = []
    for band in np.split(signature, BANDS, axis=1):
        keys = numbers.astype(np.uint64)
        for column in band.T:
            keys = (keys ^ column) * _MIX
        _, first, group = np.unique(keys, return_index=True, return_inverse=True)
        met = first[group]
        rows = np.flatnonzero(met < everything)
        alike = (signature[rows] == signature[met[rows]]).mean(axis=1) >= ALIKE
        pairs.append(np.stack([rows[alike], met[rows[alike]]]))
    return _first_of_group(everything, *np.concatenate(pairs, axis=1))


def _first_of_group(labels: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Labels lowered along the pairs until both ends of each have the same."""
    while (labels[left] != labels[right]).any():
        lower = np.minimum(labels[left], labels[right])
        labels = labels.copy()
        np.minimum.at(labels, left, lower)
        np.minimum.at(labels, right, lower)
    return labels
