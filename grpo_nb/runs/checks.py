"""What a stage has looked at and found: one type, for every stage and every tool."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import pandas as pd


class Check(NamedTuple):
    """One thing that was looked at.

    name: What was looked at, unique within its stage.
    state: "ok"; "warning": it works, and a person should know; "stop": going on is of no use;
        "not yet": what would tell has to be run first.
    evidence: What was seen, with its numbers.
    fix: What to change where it is not "ok".
    """

    name: str
    state: Literal["ok", "warning", "stop", "not yet"]
    evidence: str
    fix: str = ""


def shown(name: str, state: str, evidence: str, fix: str) -> str:
    """A check as a line of text, with what to change below it."""
    return f"{state:<8} {name:<22} {evidence}" + f"\n{'':12} → {fix}" * bool(fix)


def table(checks: Iterable[Check]) -> "pd.DataFrame":
    """A line for each check: name, state, evidence, fix."""
    import pandas as pd

    return pd.DataFrame(list(checks), columns=Check._fields)


def refuse(checks: Iterable[Check], force: bool = False) -> None:
    """Raise ValueError that names each check whose state is "stop", unless forced."""
    stops = [f"{c.name}: {c.evidence}. {c.fix}".strip() for c in checks if c.state == "stop"]
    if stops and not force:
        raise ValueError("; ".join(stops) + " (set force = True to go on regardless)")
