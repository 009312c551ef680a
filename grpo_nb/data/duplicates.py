"""The same question twice: exactly, nearly, or with another answer. Hashes only, no texts kept.

Near-duplicates have the same numbers and share most of their runs of three words, by MinHash:
"What is 47 + 38?" and "What is 47 + 39?" are two problems, however alike they read.
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_nb.data.validate import Checked
from grpo_nb.rewards.prompts import Message, split_words

PERMUTATIONS = 32  # of MinHash
ALIKE = 0.7  # share of equal MinHashes from which two rows count as near-duplicates


def fingerprints(checked: Sequence[Checked]) -> tuple[pd.DataFrame, np.ndarray]:
    """What is compared: hashes of question, answer, numbers; MinHashes [rows, PERMUTATIONS]."""
    from rensa import RMinHash

    keys = [_key(one.row["prompt"]) for one in checked]
    words = [split_words(key) for key in keys]
    hashes = {
        "row": [one.number for one in checked],
        "question": [hash(key) for key in keys],
        "answer": [hash(one.plain) for one in checked],
        "numbers": [hash(tuple(sorted(w for w in text if not w.isalpha()))) for text in words],
    }
    runs = [
        [" ".join(run) for run in zip(text, text[1:], text[2:], strict=False)] or [key]
        for text, key in zip(words, keys, strict=True)
    ]
    minhashes = RMinHash.digest_matrix_from_token_sets(runs, PERMUTATIONS, 0).to_rows()
    minhashes = np.array(minhashes, dtype=np.uint32).reshape(-1, PERMUTATIONS)
    return pd.DataFrame(hashes, dtype=np.int64), minhashes


def _key(prompt: Sequence[Message]) -> str:
    """All turns but the system's, whatever their case and spacing."""
    turns = (turn["content"] for turn in prompt if turn["role"] != "system")
    return " ".join(" ".join(turns).casefold().split())


def near(numbers: np.ndarray, minhashes: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Which rows nearly repeat a held-out one, [rows]; the held-out ones themselves do not.

    Args:
        numbers: [rows] hashes of the numbers in them.
        minhashes: [rows, PERMUTATIONS].
        held_out: Places of the held-out rows.
    """
    found = np.zeros(len(numbers), dtype=bool)
    for place in held_out:
        rows = np.flatnonzero(numbers == numbers[place])
        found[rows] |= (minhashes[rows] == minhashes[place]).mean(axis=1) >= ALIKE
    found[held_out] = False
    return found
