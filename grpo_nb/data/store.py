"""Prepared rows on disk: JSON lines, a file for each split.

    {"prompt": [system, user], "question": "What is 47 + 38?", "answer": "85", "prompt_tokens": 31}

The columns for the rewards come back as they were, also where rows differ in type.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from grpo_nb.data.sources import Row
from grpo_nb.runs import NOTEBOOKS, Run, atomic_path


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows to a file, one line of JSON each."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, default=str) + "\n" for row in rows)


def replace_train(run: Run, rows: Sequence[Row]) -> None:
    """Put these rows, in this order, in the place of the rows to train on."""
    with atomic_path(run / "data/train.jsonl") as temporary:
        write_rows(temporary, rows)


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """Return the first rows (0: all) of a file of `write_rows`.

    Raises:
        FileNotFoundError: The file does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: run {NOTEBOOKS['01']} again, it writes it")
    with path.open(encoding="utf-8") as file:
        return list(map(json.loads, islice(file, max_rows or None)))


def load(run: Run, split: str, max_rows: int = 0) -> list[Row]:
    """Return the first rows (0: all) of "train" or "eval" as stage 01 wrote them."""
    return read_rows(run / f"data/{split}.jsonl", max_rows)
