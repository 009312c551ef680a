"""A page of docs/ whose commands are run: its files, and its shell blocks in their order."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from grpo_nb.runs import PROJECT_ROOT

FENCE = re.compile(r"^## (?P<title>[^\n]+)$|^```(?P<kind>\w+)\n(?P<text>.*?)^```", re.DOTALL | re.M)
NAMED = re.compile(r"# ([\w-]+\.(?:py|yaml))\n")


class Shell(NamedTuple):
    title: str  # of the section
    text: str


def shell_blocks(page: Path, folder: Path) -> list[Shell]:
    """Write the files that the page names in their first line; its shell blocks."""
    blocks, title = [], ""
    for found in FENCE.finditer(page.read_text(encoding="utf-8")):
        title = found["title"] or title
        if found["kind"] == "bash":
            blocks.append(Shell(title, found["text"]))
        elif found["kind"] and (named := NAMED.match(found["text"])):
            (folder / named[1]).write_text(found["text"], encoding="utf-8")
    return blocks


def run_shell(text: str, folder: Path, codes: tuple[int, ...] = (0,), **variables: str) -> str:
    """What the commands print; the first that fails ends them, and the test by its exit code."""
    environment = os.environ | {"PYTHONPATH": str(PROJECT_ROOT), "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment |= {"GRPO_NB_RUNS": str(folder / "runs"), "PATH": path, **variables}
    done = subprocess.run(
        ["bash", "-ec", text], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode in codes, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout
