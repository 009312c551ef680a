"""The four notebooks, executed in order by papermill, one kernel a stage."""

import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from grpo_nb.pipeline.batches import Planned, check_run, plan_table
from grpo_nb.pipeline.execution import Stopped, execute_notebook, stoppable
from grpo_nb.runs import NOTEBOOKS, Run, git_commit, installed_versions
from grpo_nb.runs import config as configs
from grpo_nb.runs.files import read_json, write_json


def run_plans(plans: Sequence[Planned], first: str, last: str, force: bool, dry_run: bool) -> None:
    """Run them one after another, all checked before the first starts.

    Args:
        plans: The runs.
        first: "01" … "04".
        last: "01" … "04".
        force: See `run_pipeline`.
        dry_run: Print what would run, with which settings, and start nothing.

    Raises:
        RuntimeError: A run failed; the others have been tried.
    """
    console = Console()
    for name, profile, settings, origins in plans:
        config, _ = check_run(Run(name), profile, settings, first, last, force)
        if dry_run:
            console.print(plan_table(name, config, origins, first, last))
    failed = []
    for name, profile, settings, _ in [] if dry_run else plans:
        try:
            run = run_pipeline(name, profile, settings, first, force, console, last=last)
            print_summary(run, console, last)
        except RuntimeError as error:
            if isinstance(error, Stopped) or len(plans) == 1:
                raise
            print(f"grpo-nb: run {name!r}: {error}", file=sys.stderr)
            failed.append(name)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(plans)} runs failed: {', '.join(failed)}")


def run_pipeline(
    name: str,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    force: bool = False,
    console: Console | None = None,
    *,
    last: str = "04",
) -> Run:
    """Execute the stages from `first` to `last`.

    Args:
        name: Of the run; a run that is there already is executed again in place.
        profile: A name in grpo_nb/runs/profiles/, or "auto" for what suits the hardware found.
        settings: Dotted names to values, {"train.max_steps": 20}.
        first: "01" … "04"; the stages before it must be done.
        force: Start later stages although what they read has changed.
        console: Where the progress bar goes.
        last: "01" … "04".

    Raises:
        ValueError: Before anything starts: an unknown or unfit setting, a stage missing.
        RuntimeError: The run is in use.
        StageFailed: A notebook did not reach its end; what there is of it is kept.
        Stopped: SIGTERM or SIGINT came; the training saved a checkpoint first.
    """
    run, console = Run(name), console or Console()
    config, typed = check_run(run, profile, settings, first, last, force)
    lock = run.lock(".pipeline.lock")
    stages = [stage for stage in NOTEBOOKS if first <= stage <= last]
    shared = {"01": {"profile": config.profile, "task": config.task}}
    try:
        earlier = {k: v for k, v in run.settings().items() if configs.stage_of(k) < first}
        write_json(run / "settings.json", earlier | typed)
        (run / "notebooks").mkdir(exist_ok=True)
        with logged(run, f"{', '.join(map(NOTEBOOKS.get, stages))}; {config.profile}; {typed}"):
            for stage in stages:
                own = {"run_name": name, "settings": configs.of_stage(stage, typed)}
                _execute_stage(run, stage, own | shared.get(stage, {"force": force}), console)
    finally:
        lock.release()
    return run


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


def _execute_stage(run: Run, stage: str, parameters: dict[str, Any], console: Console) -> None:
    name = NOTEBOOKS[stage]
    log(run, f"{name}: started")
    console.print(f"{name} …")
    with Live(console=console, get_renderable=run.progress, refresh_per_second=4, transient=True):
        stoppable(partial(execute_notebook, run, stage, parameters))
    log(run, f"{name}: done in {run.manifest()[stage]['seconds']} s")


def print_summary(run: Run, console: Console, last: str = "04") -> None:
    """Print what a run ended with, whose stages up to `last` are done, and where things are.

    Raises:
        RuntimeError: The stages ended with `last`, "02", and the rewards failed: afterwards.
    """
    failures = read_json(run / "rewards/report.json")["failures"] if last >= "02" else []
    if last == "04":
        sentences = [one["sentence"] for one in read_json(run / "eval/report.json")["comparisons"]]
        for sentence in [one for one in sentences if one.startswith("base → merged")]:
            console.print(sentence, highlight=False, soft_wrap=True)
    for failure in failures:
        console.print(f"[bold]rewards[/]    FAILED: {escape(failure)}", soft_wrap=True)
    if last >= "02" and not failures:
        console.print("[bold]rewards[/]    passed")
    entries = [(key, entry) for key, entry in run.manifest().items() if key <= last]
    stages = ", ".join(f"{NOTEBOOKS[key]} {entry['seconds']:.0f} s" for key, entry in entries)
    console.print(f"[bold]time[/]       {stages}")
    for place in ("notebooks", "figures", *(["model/merged"] if last == "04" else [])):
        console.print(f"[bold]{place.partition('/')[0]:<10}[/] {run / place}", soft_wrap=True)
    if kept := sorted(run.path.glob("train.old-*")):
        console.print(f"[bold]kept[/]       {len(kept)} earlier trainings, the last is {kept[-1]}")
    if last == "02" and failures:
        raise RuntimeError("the rewards failed: fix them before you train")
