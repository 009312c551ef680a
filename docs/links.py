"""For mkdocs: a link to a file of the project that is no page leads to its public address."""

import posixpath
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FILES = f"{PROJECT['urls']['Repository']}/blob/main"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """`[…](../notebooks/x.ipynb)` works on a code host as it is. What is not there stays as it is,
    and mkdocs warns of it."""
    pieces = markdown.split("](../")
    for i, piece in enumerate(pieces[1:], start=1):
        path = posixpath.normpath(piece.partition(")")[0].partition("#")[0])
        pieces[i] = f"]({FILES}/{piece}" if (ROOT / path).exists() else f"](../{piece}"
    return "".join(pieces)
