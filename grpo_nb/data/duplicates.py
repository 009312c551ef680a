"""The same question twice: exactly, nearly, or with another answer. Hashes only, no texts kept.

Near-duplicates have the same numbers and share most of their runs of three words, by MinHash:
"What is 47 + 38?" and "What is 47 + 39?" are two problems, however alike they read.
"""

import json
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_nb.data.validate import Checked
from grpo_nb.rewards.prompts import Message, split_words

PERMUTATIONS = 32  # of MinHash
KNOWN = ("prompt", "question", "prompt_tokens")
ALIKE = 0.7  # share of equal MinHashes from which two rows count as near-duplicates


def fingerprints(checked: Sequence[Checked], columns: bool = False) -> pd.DataFrame:
    """What is compared: hashes of question, answer and numbers, and the MinHashes 0, 1, …

    Args:
        checked: The rows.
        columns: The columns passed on are part of the question, as an environment's are.
    """
    from rensa import RMinHash

    keys = [_key(one.row["prompt"]) for one in checked]
    if columns:
        others = [{k: v for k, v in one.row.items() if k not in KNOWN} for one in checked]
        keys = [f"{key} {json.dumps(c, default=str)}" for key, c in zip(keys, others, strict=True)]
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
    table = pd.DataFrame(minhashes, columns=range(PERMUTATIONS), dtype=np.uint32)
    return table.assign(**{name: np.array(column, np.int64) for name, column in hashes.items()})


def _key(prompt: Sequence[Message]) -> str:
    """All turns but the system's, whatever their case and spacing."""
    turns = (turn["content"] for turn in prompt if turn["role"] != "system")
    return " ".join(" ".join(turns).casefold().split())


def near(seen: pd.DataFrame, held_out: np.ndarray) -> np.ndarray:
    """Which rows nearly repeat a held-out one, [rows]; the held-out ones themselves do not.

    Args:
        seen: Fingerprints of the rows.
        held_out: Places of the held-out rows.
    """
    numbers, minhashes = seen["numbers"].to_numpy(), seen[range(PERMUTATIONS)].to_numpy()
    found = np.zeros(len(seen), dtype=bool)
    for place in held_out:
        rows = np.flatnonzero(numbers == numbers[place])
        found[rows] |= (minhashes[rows] == minhashes[place]).mean(axis=1) >= ALIKE
    found[held_out] = False
    return found
