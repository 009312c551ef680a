"""Runs of the four notebooks: from a run file and `--set` to notebooks that papermill executed.

A run file:

    name: mine
    profile: tiny-cpu
    train.max_steps: 200
    rewards.reward_weights: "1, 0.5, 0, 0"

All that can be checked is checked before anything starts. Each notebook has a kernel of its own;
one that ends too early ends in a sentence, and no stage stays at "running".
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.live import Live

from grpo_nb.runs import (
    NOTEBOOKS,
    PROJECT_ROOT,
    Run,
    check_stages_before,
    refuse_unknown,
    resolve_stages,
)
from grpo_nb.runs import config as configs
from grpo_nb.runs.files import disk_error, read_json, read_yaml, write_json
from grpo_nb.runs.profiles import TASKS
from grpo_nb.runs.signals import signals

FOLDERS = ("data.source", "model.model_path")  # or files
PATHS = (*FOLDERS, "data.environment", "rewards.preset", "rewards.cases")
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
KERNEL_ENDED = (
    "ended with the process of its kernel: killed by the system because memory ran out "
    "(docs/troubleshooting.md#out-of-memory), by a person, or by an exit in a cell. What was "
    "written before is kept: the same command with --from this stage goes on, a training from its "
    "last checkpoint"
)


class StageFailed(RuntimeError):
    """A notebook did not reach its end; the message says where, and why."""


class Stopped(StageFailed):
    """By a signal, after the notebook put its work in order; `signal` is its number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


class Planned(NamedTuple):
    """A run as it was asked for."""

    name: str
    profile: str
    settings: dict[str, Any]


def planned_run(
    file: str | None, name: str | None, profile: str | None, assignments: Sequence[str]
) -> Planned:
    """The run of a file, or of the command line alone, whose settings come on top.

    Args:
        file: A run file; a run without a `name` is called as its file.
        name: Over the file's; without both a name is made of profile and time.
        profile: Over the file's.
        assignments: As `--set` takes them, ["train.max_steps=20"].

    Raises:
        FileNotFoundError: No such file.
        ValueError: It cannot be read, or a setting is unknown.
    """
    settings = read_yaml(Path(file)) if file else {}
    stem = Path(file).stem if file else f"{profile or 'auto'}-{time.strftime('%Y%m%d-%H%M%S')}"
    named, fitted = settings.pop("name", stem), settings.pop("profile", "auto")
    for setting in settings:
        configs.refuse_unknown_setting(setting)
    return Planned(
        str(named or "") if name is None else name,
        fitted if profile is None else profile,
        with_full_paths(settings) | assigned(assignments),
    )


def check_run(
    run: Run,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    last: str = "04",
    force: bool = False,
) -> tuple[configs.RunConfig, dict[str, Any]]:
    """Everything that can be checked before anything starts; writes nothing.

    Returns:
        The configuration; and what was set, now or for these stages by an earlier call, typed.

    Raises:
        ValueError: An unknown or unfit setting, rewards that cannot be loaded, a stage missing.
    """
    from grpo_nb.rewards import load_rewards

    for stage in (first, last):
        refuse_unknown("stage", stage, list(NOTEBOOKS))
    if last < first:
        raise ValueError(f"--from {first} --to {last}: there is no stage between them")
    settings = settings or {}
    wanted = kept_settings(run, first) | settings if first > "01" else settings
    config = resolve_stages(run, wanted, first, last, profile)
    if config.trl:  # here TRL may be imported: Unsloth, which comes first, is in the kernels
        from grpo_nb.training import refuse_unknown_trl

        refuse_unknown_trl(config)
    load_rewards(config.rewards)
    if not force:
        check_stages_before(run, first)
    typed = {name: configs.flatten(config)[name] for name in wanted}
    for name in [one for one in settings if configs.stage_of(one) < first]:
        if typed.pop(name) != configs.flatten(run.config()).get(name):
            raise ValueError(
                f"{name} belongs to stage {configs.stage_of(name)}, which --from {first} "
                f"does not run: use --from {configs.stage_of(name)}"
            )
    return config, typed


def kept_settings(run: Run, first: str) -> dict[str, Any]:
    """What was set by earlier calls for the stages from `first` on, so that it is not lost."""
    kept = {k: v for k, v in run.settings().items() if configs.stage_of(k) >= first}
    kept.pop("train.resume", None)  # it was meant for one training
    return kept


def undone(run: Run) -> list[str]:
    """The stages that are not done, or not with what those before them have written since."""
    return [stage for stage in NOTEBOOKS if run.status(stage) != "done"]


def assigned(assignments: Sequence[str]) -> dict[str, Any]:
    """What `--set` gives, ["train.max_steps=20"], as settings."""
    return with_full_paths(dict(map(configs.parse_assignment, assignments)))


def with_full_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Files and folders that exist below the working directory, by their whole path."""
    return {
        name: _full_path(name, value) if name in PATHS and isinstance(value, str) else value
        for name, value in settings.items()
    }


def _full_path(name: str, value: str) -> str:
    """A path, or mine.py:Guess, a class in one; what is not there stays as it is given.

    A folder that happens to have the name of a task, an environment or a preset is not meant.
    """
    path, colon, of_file = value.partition(":") if ".py:" in value else (value, "", "")
    folder = name in FOLDERS and path not in ("", *TASKS) and Path(path).is_dir()
    there = folder or Path(path).is_file()
    return f"{Path(path).resolve()}{colon}{of_file}" if there else value


def plan(run: Run, config: configs.RunConfig, first: str, last: str) -> str:
    """Which stages would run, and every setting that is not the default, with its source."""
    import pandas as pd

    stages = ", ".join(name for stage, name in NOTEBOOKS.items() if first <= stage <= last)
    rows = configs.describe(config, "task", "seed", *configs.SECTION_STAGE)
    table = pd.DataFrame([row for row in rows if row["from"] != "default"], columns=list(rows[0]))
    shown = table.drop(columns="meaning").to_string(index=False)
    return f"{run.path}, profile {config.profile}: {stages}\n{shown}"


def run_pipeline(
    name: str,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    last: str = "04",
    force: bool = False,
    console: Console | None = None,
) -> Run:
    """Execute the stages from `first` to `last`.

    Args:
        name: Of the run; a run that is there already is executed again in place.
        profile: A name in grpo_nb/runs/profiles/, or "auto" for what suits the hardware found.
        settings: Dotted names to values, {"train.max_steps": 20}.
        first: "01" … "04"; the stages before it must be done.
        last: "01" … "04".
        force: Start later stages although what they read has changed.
        console: Where is said how far it is; None: nowhere.

    Raises:
        ValueError: Before anything starts: an unknown or unfit setting, a stage missing.
        RuntimeError: The run is in use.
        StageFailed: A notebook did not reach its end; what there is of it is kept.
        Stopped: SIGTERM or SIGINT came; the training saved a checkpoint first.
    """
    run, console = Run(name), console or Console(quiet=True, force_jupyter=False)
    config, typed = check_run(run, profile, settings, first, last, force)
    _papermill()  # while a signal still ends this process
    lock = run.lock(".pipeline.lock")
    shared = {"01": {"profile": config.profile, "task": config.task}}
    try:
        earlier = {k: v for k, v in run.settings().items() if configs.stage_of(k) < first}
        write_json(run / "settings.json", earlier | typed)
        (run / "notebooks").mkdir(exist_ok=True)
        for stage in [one for one in NOTEBOOKS if first <= one <= last]:
            own = {"run_name": name, "settings": configs.of_stage(stage, typed)}
            _execute_stage(run, stage, own | shared.get(stage, {"force": force}), console)
    finally:
        lock.release()
    return run


def _execute_stage(run: Run, stage: str, parameters: dict[str, Any], console: Console) -> None:
    """Run a notebook so that SIGTERM and SIGINT interrupt its kernel, as the button does."""

    def interrupt() -> None:
        for child in psutil.Process().children():
            child.send_signal(signal.SIGINT)

    console.print(f"{NOTEBOOKS[stage]} …")
    watched = {"get_renderable": run.progress, "refresh_per_second": 4, "transient": True}
    # nbclient would end the kernel at once; in another thread it cannot catch signals.
    with signals(interrupt) as came, Live(console=console, **watched), ThreadPoolExecutor(1) as one:
        try:
            one.submit(execute_notebook, run, stage, parameters).result()
        except StageFailed as error:
            if not came:
                raise
            raise Stopped(str(error), came[0]) from None


def print_summary(run: Run, last: str = "04") -> None:
    """Print what a run ended with, whose stages up to `last` are done, and where things are.

    Raises:
        RuntimeError: The stages ended with `last`, "02", and the rewards failed: afterwards.
    """
    if last == "04":
        for one in read_json(run / "eval/report.json")["comparisons"]:
            if (one["before"], one["after"]) == ("base", "merged"):
                print(one["sentence"])
    failures = read_json(run / "rewards/report.json")["failures"] if last >= "02" else []
    for said in [f"FAILED: {failure}" for failure in failures] or ["passed"] * (last >= "02"):
        print(f"rewards    {said}")
    entries = [(stage, one) for stage, one in run.manifest().items() if stage <= last]
    print("time      ", ", ".join(f"{NOTEBOOKS[n]} {one['seconds']:.0f} s" for n, one in entries))
    for place in ("notebooks", "figures", *(["model/merged"] if last == "04" else [])):
        print(f"{place.partition('/')[0]:<10} {run / place}")
    if last == "02" and failures:
        raise RuntimeError("the rewards failed: fix them before you train")


def execute_notebook(run: Run, stage: str, parameters: Mapping[str, Any]) -> None:
    """Run one notebook in a kernel of its own; the executed copy is kept in the run.

    Raises:
        StageFailed: A cell raised, the kernel died, the disk took no more, or the notebook ended
            without saying that its stage is done.
    """
    source = PROJECT_ROOT / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb"
    target = run / "notebooks" / source.name
    (run / "progress.json").unlink(missing_ok=True)
    set_environment(run)
    before = run.manifest().get(stage, {})
    why, entry = _execute(source, target, parameters), run.manifest().get(stage, {})
    if not why and (entry.get("status") != "done" or entry == before):
        why = "ended before its last cell, which says that the stage is done: by exit()?"
    if not why:
        return
    from grpo_nb.training.checkpoints import trained_steps

    kept = f"The notebook up to there: {target}"
    try:
        if entry != before:  # else it had not begun, and what it wrote before is its result
            run.record(stage, {"status": "failed", "error": why})
        if stage == "03" and (steps := trained_steps(run / "train")):
            kept += f"\nThe training is kept up to step {steps}: --from 03 goes on from there"
    except OSError as error:
        kept = f"The manifest could not say so: {error}"
    raise StageFailed(f"{NOTEBOOKS[stage]} {why}\n{kept}")


def set_environment(run: Run) -> None:
    """What a process of ours inherits: where the package and the runs are, and no progress bars."""
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(QUIET | {"PYTHONPATH": path, "GRPO_NB_RUNS": str(run.path.parent)})


def _papermill() -> Any:
    # Without it jsonschema leaves the format of addresses unchecked, which no notebook has; with
    # it papermill's import takes 2 s more, for its grammar.
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill

    return papermill


def _execute(source: Path, target: Path, parameters: Mapping[str, Any]) -> str:
    """Why the notebook did not reach its end; "" if it did."""
    papermill = _papermill()
    from nbclient.exceptions import DeadKernelError

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
    except papermill.PapermillExecutionError as error:
        return f"failed in cell {error.exec_count}: {error.ename}: {error.evalue}"
    except OSError as error:
        return f"was stopped: {disk_error(target, error)}"
    except DeadKernelError:
        return KERNEL_ENDED
    except RuntimeError as error:  # it did not start
        return f"failed: {error}"
    return ""
