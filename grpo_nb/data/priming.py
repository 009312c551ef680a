"""Rows for a short supervised warm-up: the prompts with completions in the wanted format.

{"prompt": [system, user], "completion": [assistant]}, as TRL's SFTTrainer takes them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_nb.data.sources import Row
from grpo_nb.rewards.prompts import tagged

Reference = Callable[[Mapping[str, Any]], str]


def priming_rows(
    rows: Sequence[Row], reference: Reference, worked_column: str = "worked"
) -> list[Row]:
    """For each prepared row its worked answer and gold, else what `reference` writes."""
    primed = []
    for row in rows:
        text = reference(row)
        if worked := row.get(worked_column):
            worked = re.sub(r"<<[^<>]*>>", "", worked).strip()  # GSM8K's calculator marks
            text = tagged(worked, row["answer"])
        completion = [{"role": "assistant", "content": text}]
        primed.append({"prompt": row["prompt"], "completion": completion})
    return primed
