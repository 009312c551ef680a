"""The four notebooks, executed in order by papermill, one kernel a stage."""

import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpo_nb import config as configs
from grpo_nb import uploads
from grpo_nb.batches import check_run
from grpo_nb.runs import (
    NOTEBOOKS,
    PROJECT_ROOT,
    Run,
    git_commit,
    installed_versions,
    write_json,
)

if TYPE_CHECKING:
    from rich.table import Table

QUIET = {
    "TQDM_DISABLE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# Otherwise each kernel says that it talks to us over a local TCP port, and at its end that it
# was interrupted.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=50"]


class StageFailed(RuntimeError):
    """A cell of a notebook raised; the message says which, and what."""


class Stopped(StageFailed):
    """By a signal, after the notebook put its work in order; `signal` is its number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


def run_pipeline(
    name: str,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    force: bool = False,
    console: Console | None = None,
    *,
    last: str = "04",
    notebooks_to: str = "",
) -> dict[str, Any]:
    """Execute the stages from `first` to `last`.

    Args:
        name: Of the run; a run that is there already is executed again in place.
        profile: See grpo_nb.profiles.PROFILES; "auto" picks by the hardware found.
        settings: Dotted names to values, {"train.max_steps": 20}.
        first: "01" … "04"; the stages before it must be done.
        force: Start later stages although what they read has changed.
        console: Where the progress bar goes.
        last: "01" … "04".
        notebooks_to: Folder or address, s3://bucket/place, that gets a copy of each notebook.

    Returns:
        The summary that `summarize` gives.

    Raises:
        ValueError: Before anything starts: an unknown or unfit setting, a stage missing.
        RuntimeError: The run is in use, or a notebook could not be copied.
        StageFailed: A cell raised; the partial notebook is kept.
        Stopped: SIGTERM or SIGINT came; the training saved a checkpoint first.
    """
    run = Run(name)
    config, typed = check_run(run, profile, settings, first, last, force)
    uploads.check_destination(notebooks_to)
    lock = run.lock(".pipeline.lock")
    stages = {key: NOTEBOOKS[key] for key in NOTEBOOKS if first <= key <= last}
    try:
        write_json(run / "settings.json", typed)
        with logged(run, f"{', '.join(stages.values())}; {config.profile}; {typed}"):
            shared = {"force": force, "profile": config.profile}
            _execute_stages(run, stages, typed, shared, console or Console(), notebooks_to)
    finally:
        lock.release()
    return summarize(run, last)


def log(run: Run, text: str) -> None:
    """A line in the run's log.txt."""
    with (run / "log.txt").open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%dT%H:%M:%S%z')} {text}\n")


@contextmanager
def logged(run: Run, what: str) -> Iterator[None]:
    """Start, versions and end of something, in the run's log."""
    started = time.monotonic()
    versions = {"python": platform.python_version(), **installed_versions()}
    log(run, f"start: {what}")
    log(run, f"commit {git_commit()}; " + ", ".join(f"{k} {v}" for k, v in versions.items()))
    try:
        yield
    except BaseException as error:
        log(run, f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}")
        raise
    log(run, f"done in {time.monotonic() - started:.1f} s")


def _execute_stages(
    run: Run,
    stages: Mapping[str, str],
    settings: dict[str, Any],
    shared: Mapping[str, Any],
    console: Console,
    notebooks_to: str,
) -> None:
    (run / "notebooks").mkdir(parents=True, exist_ok=True)
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    not_copied = []
    with Progress(*shown, TimeElapsedColumn(), console=console) as progress:
        for stage, name in stages.items():
            task = progress.add_task(name, total=None, note="")
            parameters = {"run_name": run.name} | configs.to_parameters(stage, settings)
            own = "profile" if stage == "01" else "force"
            parameters[own] = shared[own]
            log(run, f"{name}: started")
            if not console.is_terminal:  # where no bar moves
                console.print(f"{name} …")
            try:
                with _watching(run, progress, task):
                    _stoppable(partial(execute_notebook, run, stage, parameters))
            finally:
                not_copied += uploads.copy_notebook(run / f"notebooks/{name}.ipynb", notebooks_to)
            log(run, f"{name}: done in {run.manifest()[stage]['seconds']} s")
            progress.update(task, total=1, completed=1)
    if not_copied:
        raise RuntimeError("; ".join(not_copied))


def _stoppable(execute: Callable[[], Any]) -> None:
    """Run a notebook so that SIGTERM and SIGINT interrupt its kernel, as the button does."""
    came: list[int] = []

    def forward(number: int, frame: Any) -> None:
        came.append(number)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        execute()  # signals belong to the main thread
        return
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # nbclient would end the kernel at once; in another thread it cannot catch signals.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(execute).result()
    except StageFailed as error:
        if not came:
            raise
        raise Stopped(str(error), came[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute_notebook(run: Run, stage: str, parameters: Mapping[str, Any]) -> Path:
    """Run one notebook in a kernel of its own; returns the executed copy in the run."""
    # Without it jsonschema leaves the format of addresses unchecked, which no notebook has; with
    # it papermill's import takes 2 s more, for its grammar.
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill
    from papermill.exceptions import PapermillExecutionError

    source = PROJECT_ROOT / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb"
    target = run / "notebooks" / source.name
    (run / "progress.json").unlink(missing_ok=True)
    python_path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(QUIET | {"PYTHONPATH": python_path, "GRPO_NB_RUNS": str(run.path.parent)})
    try:
        papermill.execute_notebook(
            source,
            target,
            parameters=dict(parameters),
            cwd=source.parent,
            kernel_name="python3",
            progress_bar=False,
            extra_arguments=KERNEL_ARGUMENTS,
            store_widget_state=False,
        )
    except PapermillExecutionError as error:
        run.record(stage, {"status": "failed", "error": f"{error.ename}: {error.evalue}"})
        raise StageFailed(
            f"{NOTEBOOKS[stage]} failed in cell {error.exec_count}: {error.ename}: "
            f"{error.evalue}\nThe notebook up to that cell: {target}"
        ) from None
    return target


@contextmanager
def _watching(run: Run, progress: Progress, task: TaskID) -> Iterator[None]:
    """Copy the stage's progress.json into its bar, four times a second."""
    stopped = threading.Event()

    def copy() -> None:
        if (run / "progress.json").exists():
            state = json.loads((run / "progress.json").read_text(encoding="utf-8"))
            note = f"{state['done']}/{state['total']} {state['note']}"
            progress.update(task, total=state["total"], completed=state["done"], note=note)

    def poll() -> None:
        while not stopped.wait(0.25):
            copy()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        copy()


def summarize(run: Run, last: str = "04") -> dict[str, Any]:
    """What the run ended with: verdict, evaluation report, seconds a stage, where things are.

    Args:
        run: All of its stages up to `last` are done; before "04" there is no report.
    """
    report, failures = None, None
    if last >= "02":
        failures = json.loads((run / "rewards/report.json").read_text("utf-8"))["failures"]
    if last == "04":
        report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    entries = {stage: entry for stage, entry in run.manifest().items() if stage <= last}
    places = {"notebooks": run / "notebooks", "figures": run / "figures"}
    places |= {"model": run / "model/merged"} if report else {}
    seconds = {NOTEBOOKS[stage]: entry["seconds"] for stage, entry in entries.items()}
    return {"report": report, "failures": failures, "seconds": seconds, **places}


def print_summary(summary: Mapping[str, Any], console: Console, last: str = "04") -> None:
    """Print what `summarize` gave.

    Raises:
        RuntimeError: The stages ended with `last`, "02", and the rewards failed: afterwards.
    """
    if summary["report"]:
        console.print(_before_after(summary["report"]))
    if summary["failures"] is not None:
        for failure in summary["failures"]:
            console.print(f"[bold]rewards[/]    FAILED: {escape(failure)}", soft_wrap=True)
        if not summary["failures"]:
            console.print("[bold]rewards[/]    passed")
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    console.print(f"[bold]time[/]       {stages}")
    for key in [name for name in ("notebooks", "figures", "model") if name in summary]:
        console.print(f"[bold]{key:<10}[/] {summary[key]}", soft_wrap=True)
    if last == "02" and summary["failures"]:
        raise RuntimeError("the rewards failed: mend them before you train")


def _before_after(report: Mapping[str, Any]) -> "Table":
    from rich.table import Table

    table = Table(title=f"{report['prompts']} held-out prompts", title_justify="left")
    for column in ("", "accuracy before → after", "format before → after"):
        table.add_column(column)
    for decoding in ("greedy", "sampled"):
        before, after = report[decoding]["base"], report[decoding]["merged"]
        cells = [
            f"{before[key]:.1%} → {after[key]:.1%}" if after[key] is not None else "not asked for"
            for key in ("accuracy", "format")
        ]
        table.add_row(decoding, *cells)
    return table
