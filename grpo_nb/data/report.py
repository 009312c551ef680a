"""What stage 01 found: rows left out, by reason, and how long the prompts are."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_nb.data.validate import GOLD, LONG, REMEDIES, Fault
from grpo_nb.runs.config import DataConfig

SHOWN_ROWS = 20  # numbers of rows named per reason
SHOWN_FAULTS = 5  # rows named in one error


class Drops:
    """Rows left out: how many, which and why."""

    def __init__(self) -> None:
        self.reasons: dict[str, dict[str, Any]] = {}
        self.first: list[str] = []
        self.rows_read = 0

    def add(self, reason: str, rows: Sequence[int], column: str = "", value: str = "") -> None:
        if len(rows):
            remedy = REMEDIES.get(reason, "")
            empty = {"reason": reason, "count": 0, "rows": [], "column": column, "value": value}
            entry = self.reasons.setdefault(reason, {**empty, "remedy": remedy})
            entry["count"] += len(rows)
            entry["rows"] += [int(row) for row in rows[: SHOWN_ROWS - len(entry["rows"])]]

    def add_faults(self, faults: Sequence[Fault], rows_read: int) -> None:
        """The faults among so many more rows of the source."""
        self.rows_read += rows_read
        for fault in faults:
            self.add(fault.reason, [fault.row], fault.column, fault.value)
        faulty = [str(fault) for fault in faults if fault.reason != LONG]
        self.first += faulty[: SHOWN_FAULTS - len(self.first)]

    def refuse_many(self, config: DataConfig) -> None:
        """Raise ValueError if more rows are faulty than `data.max_dropped_share` allows."""
        if not self.rows_read:
            raise ValueError(f"{config.source} holds no rows: give a data.source that does")
        faulty = sum(entry["count"] for why, entry in self.reasons.items() if why != LONG)
        if faulty > config.max_dropped_share * self.rows_read:
            shown = "\n  ".join(self.first)
            raise ValueError(
                f"{faulty} of {self.rows_read} rows of {config.source} cannot be used, more than "
                f"data.max_dropped_share = {config.max_dropped_share:g} of them:\n  {shown}"
            )

    def __str__(self) -> str:
        texts = [f"{e['count']} {e['reason']} ({e['remedy']})" for e in self.reasons.values()]
        return "; ".join(texts).replace(" ()", "") or "none"


def figures(tokens: np.ndarray, drops: Drops) -> dict[str, Any]:
    """Share of golds that parse; lengths of all prompts, and the cap that keeps 99 % of them."""
    unparsed = drops.reasons.get(GOLD, {"count": 0})["count"]
    counts, edges = np.histogram(tokens, bins=min(40, int(np.ptp(tokens)) + 1))
    p50, p95, p99 = (int(np.percentile(tokens, p, method="higher")) for p in (50, 95, 99))
    lengths = {"p50": p50, "p95": p95, "p99": p99, "max": int(tokens.max())}
    lengths["recommended_cap"] = -(-p99 // 8) * 8
    lengths["histogram"] = {"edges": edges.round(1).tolist(), "counts": counts.tolist()}
    return {"gold_parse_rate": len(tokens) / (len(tokens) + unparsed), "prompt_tokens": lengths}
