"""Re-execute the notebooks in place, as they are committed.

    make notebooks

The parameters stay as they stand, so on a machine without a GPU the tiny profile runs.
The project's address comes from pyproject.toml; outputs are stored without timings, and
with a digest of the code they came from, by which a test sees when the two part.
"""

import hashlib
import os
import re
import tempfile
import tomllib
from pathlib import Path

import nbformat
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.notebooks import KERNEL_ARGUMENTS, QUIET
from grpo_nb.pipeline.sweep import read_sweep, run_sweep
from grpo_nb.runs import NOTEBOOKS, runs_root
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
PLACE = "/path/to/grpo_nb"  # stands for the folder of this machine
QUICKSTART = "00_quickstart"  # all stages on one page, with cells of the others
COMPARE = "05_compare_runs"  # no stage of a run: it reads finished ones


def project_url() -> str:
    """The one place where the public address stands."""
    pyproject = tomllib.loads(
        (PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8")
    )
    return pyproject["project"]["urls"]["Repository"]


def badge(url: str, name: str) -> str:
    repository = url.removeprefix("https://github.com/")
    target = (
        f"https://colab.research.google.com/github/{repository}/blob/main/notebooks"
    )
    return f"[Open in Colab]({target}/{name}.ipynb)"


def set_url(notebook: nbformat.NotebookNode, url: str, name: str) -> None:
    """Write the address into the links to Colab and glossary, and the set-up cell."""
    cells = notebook.cells
    cells[0].source = re.sub(r"\[Open in Colab\].*", badge(url, name), cells[0].source)
    cells[1].source = re.sub(
        r'PROJECT_URL = ".*"', f'PROJECT_URL = "{url}"', cells[1].source
    )
    cells[-1].source = re.sub(
        r"\(https\S*(/blob/main/docs/\S*)\)", rf"({url}\1)", cells[-1].source
    )


def join(quickstart: nbformat.NotebookNode) -> list[str]:
    """Copy the cells of notebooks 1 to 4 to its cells with the same ids."""
    stages = [nbformat.read(FOLDER / f"{name}.ipynb", 4) for name in NOTEBOOKS.values()]
    theirs = {cell.id: cell for notebook in stages for cell in notebook.cells}
    shared = [cell for cell in quickstart.cells if cell.id in theirs]
    for cell in shared:
        cell.source, cell.metadata = theirs[cell.id].source, theirs[cell.id].metadata
    return [cell.id for cell in shared]


def source_digest(notebook: nbformat.NotebookNode) -> str:
    """sha256 of all code; stored with the outputs that the code gave."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()


def refresh(name: str) -> None:
    path = FOLDER / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    if name == QUICKSTART:
        join(notebook)
    set_url(notebook, project_url(), name)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=None,
        record_timing=False,
        store_widget_state=False,
        extra_arguments=KERNEL_ARGUMENTS,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    notebook.metadata["grpo_nb"] = {"source_sha256": source_digest(notebook)}
    text = nbformat.writes(notebook).replace(str(PROJECT_ROOT), PLACE)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{path.name}: executed, {path.stat().st_size / 1000:.0f} kB")


def refresh_comparison() -> None:
    """Notebook 5, over runs that are made for it and not kept."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        if run_sweep(read_sweep(FOLDER / "compare.yaml")):
            raise SystemExit("a run for notebook 5 failed; see above")
        refresh(COMPARE)


if __name__ == "__main__":
    if any(runs_root().glob("*")):  # the notebooks would go on with those runs
        raise SystemExit(f"move {runs_root()} away first: its runs would show")
    os.environ.update(QUIET)
    for notebook_name in (QUICKSTART, *NOTEBOOKS.values()):
        refresh(notebook_name)
    refresh_comparison()
