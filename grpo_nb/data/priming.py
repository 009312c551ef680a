"""Rows for a short supervised warm-up: the prompts with completions in the wanted format.

{"prompt": [system, user], "completion": [{"role": "assistant", "content": …}]}, as TRL's
SFTTrainer takes them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data.sources import Row
from grpo_nb.prompts import ANSWER, REASONING

Reference = Callable[[Mapping[str, Any]], str]


def without_calculator(worked: str) -> str:
    """A worked answer without GSM8K's calculator marks.

    >>> without_calculator("She earned 0.2 x 50 = $<<0.2*50=10>>10.")
    'She earned 0.2 x 50 = $10.'
    """
    return re.sub(r"<<[^<>]*>>", "", worked).strip()


def priming_rows(
    rows: Sequence[Row], reference: Reference, worked_column: str = "worked"
) -> list[Row]:
    """A completion for each row: its worked answer, where it has one, else the reference.

    Args:
        rows: Prepared rows.
        reference: Writes the completion that wins every reward, as a RewardSet does.
        worked_column: Column of worked answers; the gold is put behind them.
    """
    primed = []
    for row in rows:
        text = reference(row)
        if worked := without_calculator(row.get(worked_column) or ""):
            text = f"<{REASONING}>{worked}</{REASONING}><{ANSWER}>{row['answer']}</{ANSWER}>"
        completion = [{"role": "assistant", "content": text}]
        primed.append({"prompt": row["prompt"], "completion": completion})
    return primed


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write the rows as Parquet."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
