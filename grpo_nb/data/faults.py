"""Report why a row cannot be used, and what to do about it."""

from pathlib import Path

from grpo_nb.data.references import printable
from grpo_nb.files import read_yaml

REMEDIES = read_yaml(Path(__file__).with_name("remedies.yaml"))  # {reason: what to do}


class Fault(Exception):
    """Report why a row cannot be used."""

    def __init__(self, reason: str, column: str, value: str) -> None:
        self.reason, self.row = reason, 0  # the row's number is set later
        self.column, self.value = printable(column), printable(value)

    @property
    def evidence(self) -> str:
        """Return a message that names the row, the column, the reason and the value."""
        where = f"row {self.row}" + (f", column {self.column!r}" if self.column else "")
        return f"{where}: {self.reason}: {self.value}"

    def __str__(self) -> str:
        return f"{self.evidence}. Remedy: {REMEDIES[self.reason]}"
