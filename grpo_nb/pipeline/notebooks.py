"""The four notebooks, executed in order by papermill, one kernel a stage."""

import platform
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpo_nb.pipeline.batches import check_run
from grpo_nb.pipeline.execution import execute_notebook, stoppable
from grpo_nb.runs import NOTEBOOKS, Run, git_commit, installed_versions
from grpo_nb.runs import config as configs
from grpo_nb.runs.files import read_json, write_json

if TYPE_CHECKING:
    from rich.table import Table


def run_pipeline(
    name: str,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    force: bool = False,
    console: Console | None = None,
    *,
    last: str = "04",
) -> dict[str, Any]:
    """Execute the stages from `first` to `last`.

    Args:
        name: Of the run; a run that is there already is executed again in place.
        profile: See grpo_nb.runs.profiles.PROFILES; "auto" picks by the hardware found.
        settings: Dotted names to values, {"train.max_steps": 20}.
        first: "01" … "04"; the stages before it must be done.
        force: Start later stages although what they read has changed.
        console: Where the progress bar goes.
        last: "01" … "04".

    Returns:
        The summary that `summarize` gives.

    Raises:
        ValueError: Before anything starts: an unknown or unfit setting, a stage missing.
        RuntimeError: The run is in use.
        StageFailed: A notebook did not reach its end; what there is of it is kept.
        Stopped: SIGTERM or SIGINT came; the training saved a checkpoint first.
    """
    run = Run(name)
    config, typed = check_run(run, profile, settings, first, last, force)
    lock = run.lock(".pipeline.lock")
    stages = {key: NOTEBOOKS[key] for key in NOTEBOOKS if first <= key <= last}
    try:
        earlier = {k: v for k, v in run.settings().items() if configs.stage_of(k) < first}
        write_json(run / "settings.json", earlier | typed)
        with logged(run, f"{', '.join(stages.values())}; {config.profile}; {typed}"):
            own = {"profile": config.profile, "task": config.task}
            shared = {stage: {"force": force} if stage > "01" else own for stage in stages}
            _execute_stages(run, stages, typed, shared, console or Console())
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
        with suppress(OSError):  # a full disk takes no line either, and is what is raised
            log(run, f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}")
        raise
    log(run, f"done in {time.monotonic() - started:.1f} s")


def _execute_stages(
    run: Run,
    stages: Mapping[str, str],
    settings: dict[str, Any],
    shared: Mapping[str, Any],
    console: Console,
) -> None:
    (run / "notebooks").mkdir(parents=True, exist_ok=True)
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*shown, TimeElapsedColumn(), console=console) as progress:
        for stage, name in stages.items():
            task = progress.add_task(name, total=None, note="")
            own = {"settings": configs.of_stage(stage, settings), **shared[stage]}
            parameters = {"run_name": run.name, **own}
            log(run, f"{name}: started")
            if not console.is_terminal:  # where no bar moves
                console.print(f"{name} …")
            with _watching(run, progress, task):
                stoppable(partial(execute_notebook, run, stage, parameters))
            log(run, f"{name}: done in {run.manifest()[stage]['seconds']} s")
            progress.update(task, total=1, completed=1)


@contextmanager
def _watching(run: Run, progress: Progress, task: TaskID) -> Iterator[None]:
    """Copy the stage's progress.json into its bar, four times a second."""
    stopped = threading.Event()

    def copy() -> None:
        if (run / "progress.json").exists():
            state = read_json(run / "progress.json")
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
        failures = read_json(run / "rewards/report.json")["failures"]
    if last == "04":
        report = read_json(run / "eval/report.json")
    entries = {stage: entry for stage, entry in run.manifest().items() if stage <= last}
    places = {"notebooks": run / "notebooks", "figures": run / "figures"}
    places |= {"model": run / "model/merged"} if report else {}
    if kept := sorted(run.path.glob("train.old-*")):
        places["kept"] = f"{len(kept)} earlier trainings, the last is {kept[-1]}"
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
    for key in [name for name in ("notebooks", "figures", "model", "kept") if name in summary]:
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
