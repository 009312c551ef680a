"""Refuse names that a user has mistyped, or that have another name here."""

import difflib
from pathlib import Path

from grpo_nb.files import read_yaml

FEW = 6  # names that are all listed beside the nearest one
ELSEWHERE = read_yaml(Path(__file__).with_name("elsewhere.yaml"))  # {argument: what to do}


def refuse_unknown(what: str, name: str, names: list[str]) -> None:
    """Raise ValueError if `name` is unknown, and suggest the nearest known name.

    For an argument in ELSEWHERE, which public notebooks use, the message says what to do instead.
    """
    if name in names:
        return
    refuse_elsewhere(name)
    last = str(name).rpartition(".")[2]
    near = [each for each in names if each.rpartition(".")[2] == last]  # in another section
    near = near or difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    listed = f"known names: {', '.join(names)}."
    hint = f"did you mean {near[0]!r}?" if near else listed
    hint += f" ({listed})" if near and len(names) <= FEW else ""
    raise ValueError(f"unknown {what} {name!r}: {hint}")


def refuse_elsewhere(name: str) -> None:
    """Raise ValueError if the last part of a dotted name is in ELSEWHERE."""
    if advice := ELSEWHERE.get(str(name).rpartition(".")[2]):
        raise ValueError(f"{name} cannot be used here: {advice}")
