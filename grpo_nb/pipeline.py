"""The four notebooks, executed in order by papermill, one kernel a stage."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from grpo_nb import config as configs
from grpo_nb.profiles import refuse_unknown
from grpo_nb.runs import (
    NOTEBOOKS,
    PROJECT_ROOT,
    Run,
    check_stages_before,
    resolve_stage,
    write_json,
)

QUIET = {
    "TQDM_DISABLE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# Otherwise each kernel warns that it talks to us over a local TCP port.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=40"]


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
    last: str = "04",
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

    Returns:
        The summary that `summarize` gives; empty where `last` is before "04".

    Raises:
        ValueError: Before anything starts: an unknown or unfit setting, a stage missing.
        RuntimeError: The run is in use.
        StageFailed: A cell raised; the partial notebook is kept.
        Stopped: SIGTERM or SIGINT came; the training saved a checkpoint first.
    """
    run = Run(name)
    for stage in (first, last):
        refuse_unknown("stage", stage, list(NOTEBOOKS))
    settings = {**_settings_before(run, first), **(settings or {})}
    config = resolve_stage(run, first, profile, settings)
    if config.trl:
        from grpo_nb.training.arguments import refuse_unknown_trl

        refuse_unknown_trl(config)
    for setting in settings:
        if configs.stage_of(setting) < first:
            raise ValueError(
                f"{setting} belongs to stage {configs.stage_of(setting)}, which --from {first} "
                f"does not run: use --from {configs.stage_of(setting)}"
            )
    lock = run.lock(".pipeline.lock")
    try:
        if not force:
            check_stages_before(run, first)
        typed = {setting: configs.flatten(config)[setting] for setting in settings}
        write_json(run / "settings.json", typed)
        stages = [stage for stage in NOTEBOOKS if first <= stage <= last]
        _execute_stages(run, config.profile, typed, stages, force, console or Console())
    finally:
        lock.release()
    return summarize(run) if last == "04" else {}


def _settings_before(run: Run, first: str) -> dict[str, Any]:
    """What earlier calls set for the stages that --from runs again, lest it be lost."""
    kept = run.settings() if first > "01" else {}
    return {name: value for name, value in kept.items() if configs.stage_of(name) >= first}


def _execute_stages(
    run: Run,
    profile: str,
    settings: dict[str, Any],
    stages: list[str],
    force: bool,
    console: Console,
) -> None:
    (run / "notebooks").mkdir(parents=True, exist_ok=True)
    shown = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Progress(*shown, TimeElapsedColumn(), console=console) as progress:
        for stage in stages:
            task = progress.add_task(NOTEBOOKS[stage], total=None, note="")
            parameters = {"run_name": run.name} | configs.to_parameters(stage, settings)
            parameters |= {"profile": profile} if stage == "01" else {"force": force}
            with _watching(run, progress, task):
                _stoppable(partial(execute_notebook, run, stage, parameters))
            progress.update(task, total=1, completed=1)


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


def summarize(run: Run) -> dict[str, Any]:
    """What the run ended with: the evaluation report, seconds a stage, and where things are."""
    report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    seconds = {NOTEBOOKS[stage]: entry["seconds"] for stage, entry in run.manifest().items()}
    return {
        "report": report,
        "seconds": seconds,
        "notebooks": run / "notebooks",
        "figures": run / "figures",
        "model": run / "model/merged",
    }


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    from rich.table import Table

    report = summary["report"]
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
    console.print(table)
    stages = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    console.print(f"[bold]time[/]       {stages}")
    for key in ("notebooks", "figures", "model"):
        console.print(f"[bold]{key:<10}[/] {summary[key]}", soft_wrap=True)
