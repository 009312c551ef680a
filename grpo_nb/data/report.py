"""What stage 01 found: rows left out, by reason, and the figures of those that stay."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_nb.config import DataConfig
from grpo_nb.data.validate import LONG, REMEDIES, Fault

SHOWN_ROWS = 20  # numbers of rows named per reason
SHOWN_FAULTS = 5  # rows named in one error


class Drops:
    """Rows left out: how many, which and why."""

    def __init__(self) -> None:
        self.reasons: dict[str, dict[str, Any]] = {}
        self.faults: list[Fault] = []
        self.faulty = 0

    def add(self, reason: str, rows: Sequence[int], column: str = "", value: str = "") -> None:
        if not len(rows):
            return
        first = {"column": column, "value": value, "remedy": REMEDIES.get(reason, "")}
        empty = {"reason": reason, "count": 0, "rows": [], **first}
        entry = self.reasons.setdefault(reason, empty)
        entry["count"] += len(rows)
        entry["rows"] += [int(row) for row in rows[: SHOWN_ROWS - len(entry["rows"])]]

    def add_faults(self, faults: Sequence[Fault]) -> None:
        """Rows of the source that are wrong themselves; one for each fault."""
        for fault in faults:
            self.add(fault.reason, [fault.row], fault.column, fault.value)
        self.faults += faults[: SHOWN_FAULTS - len(self.faults)]
        self.faulty += sum(fault.reason != LONG for fault in faults)

    def refuse_many(self, rows_read: int, config: DataConfig) -> None:
        """Raise ValueError if more rows are faulty than `data.max_dropped_share` allows."""
        if self.faulty > config.max_dropped_share * rows_read:
            shown = "\n  ".join(map(str, self.faults))
            raise ValueError(
                f"{self.faulty} of {rows_read} rows of {config.source} cannot be used, more than "
                f"data.max_dropped_share = {config.max_dropped_share:g} of them:\n  {shown}"
            )

    def summary(self) -> str:
        entries = self.reasons.values()
        texts = [f"{e['count']} {e['reason']} ({e['remedy'] or 'see rows'})" for e in entries]
        return "; ".join(texts) or "none"


def token_figures(tokens: np.ndarray) -> dict[str, Any]:
    """Lengths of all prompts, those too long among them, and the cap that keeps 99 %."""
    counts, edges = np.histogram(tokens, bins=min(40, int(np.ptp(tokens)) + 1))
    p50, p95, p99 = (int(np.percentile(tokens, p, method="higher")) for p in (50, 95, 99))
    return {
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "max": int(tokens.max()),
        "recommended_cap": -(-p99 // 8) * 8,
        "histogram": {"edges": edges.round(1).tolist(), "counts": counts.tolist()},
    }
