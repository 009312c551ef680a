"""Refuse names that a user has mistyped; the error suggests the nearest known name."""

import difflib


def refuse_unknown(what: str, name: str, names: list[str]) -> None:
    """Raise ValueError if `name` is unknown, and suggest the nearest known name."""
    if name in names:
        return
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known names: {', '.join(names)}."
    raise ValueError(f"unknown {what} {name!r}: {hint}")
