"""Run the notebooks with papermill, or notebook 3 as a script, with settings of a file or `--set`.

A run file:

    name: mine
    profile: tiny-cpu
    grpo.max_steps: 200
    rewards.reward_weights: "1, 0.5, 0, 0"

Everything that can be checked in advance is checked before anything starts. Each notebook runs in
its own kernel. If a kernel ends too early, an error gives the reason, and the stage is not left as
"running".

`train` executes the cells of notebook 3 as a script, without a kernel: in one process, or under a
launcher in one process per GPU, of which only the first writes files and prints (docs/launch.md):

    python -m torch.distributed.run --nproc_per_node 8 -m grpo_nb train runs/NAME --processes 8
    accelerate launch --config_file docs/launch/fsdp.yaml -m grpo_nb train runs/NAME
"""

import os
import re
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import psutil

from grpo_nb import models, ranks
from grpo_nb.files import read_json, read_yaml
from grpo_nb.machine import PROJECT_ROOT, limit_spinning
from grpo_nb.models.hub import find_model
from grpo_nb.names import refuse_unknown
from grpo_nb.runs import NOTEBOOKS, Run, refuse_undone, resolve_stages
from grpo_nb.runs import config as configs
from grpo_nb.training.interruptions import signals

FOLDERS = ("data.source", "model.model_name")  # these may also be files
PATHS = (*FOLDERS, "data.environment", "rewards.preset")
QUIET = {
    "TQDM_DISABLE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# Silences each kernel's warnings that it uses a local TCP port, and that it was interrupted.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=50"]
KERNEL_ENDED = (
    "stopped because its kernel died: the system killed it when memory ran out "
    "(docs/troubleshooting.md#out-of-memory), or a user did. What was written before is kept"
)
SECONDS_TO_STOP = 20  # after a second signal; then a notebook's kernel is killed
# A process that lost the connection to another one waits this long before it records its error.
# The launcher names the earliest error as the cause. It polls every 0.1 s, and rounds to seconds.
SECONDS_TO_BE_ENDED = 3


class StageFailed(RuntimeError):
    """Report where and why a notebook did not finish; `signal` is the stopping signal, or 0."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.signal = number


def planned_run(
    file: str | None, name: str | None, profile: str | None, assignments: Sequence[str]
) -> tuple[str, str, dict[str, Any]]:
    """Combine a run file with the command line, whose values override the file's.

    Args:
        file: A run file, if there is one.
        name: The name of the run; by default the one in the file, or the file's own name. Without
            a file, it is made from profile and time.
        profile: The profile of the run.
        assignments: Settings in the form of `--set`, such as ["grpo.max_steps=20"].

    Returns:
        The run's name, profile and settings.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file cannot be read.
    """
    settings = read_yaml(Path(file)) if file else {}
    if {"grid", "list"} & settings.keys():
        raise ValueError(f"{file} is a file of a sweep: python -m grpo_nb sweep {file}")
    sections = {k: v for k, v in settings.items() if k in configs.SECTIONS and isinstance(v, dict)}
    for section, values in sections.items():
        settings |= {f"{section}.{key}": value for key, value in values.items()}
        del settings[section]
    if "settings" in settings and "profile" not in settings:
        raise ValueError(f"{file}: write each setting by itself, as in grpo.max_steps: 20")
    if "settings" in settings:  # a run's own config.yaml
        config = configs.read(Path(file))
        settings = {"profile": config.profile, **configs.set_values(config)}
    stem = Path(file).stem if file else f"{profile or 'auto'}-{time.strftime('%Y%m%d-%H%M%S')}"
    settings = {"name": stem, "profile": "auto"} | settings
    in_file = settings.pop("name") or "", settings.pop("profile")
    name = str(in_file[0]) if name is None else name
    profile = in_file[1] if profile is None else profile
    return name, profile, with_full_paths(settings | assigned(assignments))


def resolve_run(
    run: Run,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    last: str = "04",
    force: bool = False,
) -> tuple[configs.RunConfig, dict[str, Any]]:
    """Resolve the settings of a run, and refuse those that would fail; write nothing.

    Returns:
        The configuration, and the settings of this call and of earlier calls for these stages,
        converted to their types.

    Raises:
        ValueError: A setting is unknown or does not fit, rewards cannot be loaded, or an earlier
            stage is missing.
    """
    from grpo_nb.rewards import load_rewards
    from grpo_nb.stages import refuse_arguments

    for stage in (first, last):
        refuse_unknown("stage", stage, list(NOTEBOOKS))
    if last < first:
        raise ValueError(f"--from {first} --to {last}: --from must not come after --to")
    settings = settings or {}
    earlier = run.settings(first) if first > "01" else {}
    config = resolve_stages(run, earlier | settings, first, last, profile)
    refuse_arguments(config.grpo.model_extra)
    load_rewards(config.rewards)
    if config.export.gguf and last == "04":
        from grpo_nb.export.gguf import kinds_of

        kinds_of(config.export.gguf)
    if not force:
        refuse_undone(run, first)
    if first > "01" and profile not in ("auto", config.profile):
        raise ValueError(f"--profile {profile}: the run has {config.profile}, set by stage 01")
    for name in [name for name in settings if configs.stage_of(name) < first]:
        if configs.flatten(config)[name] != configs.flatten(run.config()).get(name):
            raise ValueError(
                f"{name} belongs to stage {configs.stage_of(name)}, which --from {first} "
                f"does not run: use --from {configs.stage_of(name)}"
            )
    values = configs.set_values(config)
    return config, {name: v for name, v in values.items() if configs.stage_of(name) >= first}


def assigned(assignments: Sequence[str]) -> dict[str, Any]:
    """Convert the assignments of `--set` to settings, such as {"grpo.max_steps": "20"}.

    Raises:
        ValueError: An assignment has no `=`.
    """
    settings: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise ValueError(f"--set {assignment!r}: write NAME=VALUE, such as grpo.beta=0.1")
        settings[name.strip()] = value
    return settings


def with_full_paths(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Make relative paths of existing files and folders absolute."""
    return {
        name: _full_path(name, value) if name in PATHS and isinstance(value, str) else value
        for name, value in settings.items()
    }


def _full_path(name: str, value: str) -> str:
    """Make an existing path absolute, even in "mine.py:Guess"; return anything else unchanged.

    The name of a task, environment or preset is not taken for a folder of that name.
    """
    path, colon, of_file = value.partition(":") if ".py:" in value else (value, "", "")
    folder = name in FOLDERS and path not in ("", *configs.TASKS) and Path(path).is_dir()
    there = folder or Path(path).is_file()
    return f"{Path(path).resolve()}{colon}{of_file}" if there else value


def plan(run: Run, config: configs.RunConfig, first: str, last: str) -> str:
    """Describe the stages that would run, and every non-default setting with its source."""
    import pandas as pd

    stages = ", ".join(name for stage, name in NOTEBOOKS.items() if first <= stage <= last)
    rows = configs.describe(config, "task", "seed", *configs.SECTION_STAGE)
    table = pd.DataFrame([row for row in rows if row["from"] != "default"], columns=list(rows[0]))
    text = table.drop(columns="meaning").to_string(index=False)
    return f"{run.path}, profile {config.profile}: {stages}\n{text}"


def run_pipeline(
    name: str,
    profile: str = "auto",
    settings: Mapping[str, Any] | None = None,
    first: str = "01",
    last: str = "04",
    force: bool = False,
    dry_run: bool = False,
) -> Run:
    """Execute the stages from `first` to `last`, and print each with its progress.

    Args:
        name: The name of the run; an existing run is executed again in place.
        profile: A name in grpo_nb/runs/profiles/, or "auto" for the one that fits this machine.
        settings: Values by dotted name, such as {"grpo.max_steps": 20}.
        first: The first stage, "01" … "04"; the stages before it must be done.
        last: The last stage, "01" … "04".
        force: Whether to start a stage even if its inputs have changed.
        dry_run: Whether to start nothing, and only print what would be executed.

    Raises:
        ValueError: Before anything starts: a setting is unknown or does not fit, or an earlier
            stage is missing.
        RuntimeError: Another process is using the run.
        StageFailed: A notebook did not finish; its executed part is kept. On SIGTERM or SIGINT,
            training saved a checkpoint first.
    """
    run = Run(name)
    config, converted_settings = resolve_run(run, profile, settings, first, last, force)
    find_model(config.model.model_name)
    if dry_run:
        print(plan(run, config, first, last))
        return run
    lock = run.lock(".pipeline.lock")
    try:
        run.write_config(config)
        (run / "notebooks").mkdir(exist_ok=True)
        for stage in [stage for stage in NOTEBOOKS if first <= stage <= last]:
            own = {"run_name": name, "settings": configs.of_stage(stage, converted_settings)}
            begin = {"profile": config.profile, "task": config.task}
            _execute_stage(run, stage, own | (begin if stage == "01" else {"force": force}))
    finally:
        lock.release()
    return run


def _execute_stage(run: Run, stage: str, parameters: dict[str, Any]) -> None:
    """Run a notebook; SIGTERM and SIGINT interrupt its kernel, as the interrupt button does.

    The kernel gets two signals at most. It ends if it is still there some time after the second,
    because a signal that arrives while it replies may leave it waiting for ever.
    """
    interrupted: list[float] = []

    def interrupt() -> None:
        interrupted.append(time.monotonic())
        if len(interrupted) <= 2:
            send(signal.SIGINT)

    def send(number: int) -> None:
        for child in psutil.Process().children():
            child.send_signal(number)

    print(f"{NOTEBOOKS[stage]} …", flush=True)
    # On a signal nbclient would end the kernel at once; in another thread it gets no signals.
    pool = ThreadPoolExecutor(1)
    with signals(interrupt) as received, pool:
        task = pool.submit(execute_notebook, run, stage, parameters)
        while wait([task], timeout=0.25).not_done:
            if sys.stdout.isatty():
                print(f"{run.progress():<79}", end="\r", flush=True)
            if len(interrupted) > 1 and time.monotonic() - interrupted[1] > SECONDS_TO_STOP:
                send(signal.SIGKILL)
        try:
            task.result()
        except StageFailed as error:
            again = re.search(r"run (0[1-4])_\w+\.ipynb again", str(error))
            text = f"python -m grpo_nb run --name {run.name} --from {again[1] if again else stage}"
            if not received and stage > "01":
                text += ", or from the stage to which a setting that you change belongs"
            raise StageFailed(f"{error}\nTo go on: {text}", *received[:1]) from None


def print_summary(run: Run, last: str = "04") -> None:
    """Print the results of a run whose stages up to `last` are done, and where its files are.

    Raises:
        StageFailed: `last` is "02" and its verdict failed; raised after printing.
    """
    if last == "04":
        for pair in read_json(run / "eval/report.json")["comparisons"]:
            if pair["after"] == "merged":
                print(pair["sentence"])
    failures = read_json(run / "rewards/report.json")["failures"] if last >= "02" else []
    for failure in failures:
        print(f"rewards    FAILED: {failure}")
    if last >= "02" and not failures:
        print("rewards    passed")
    print(f"results    {run.path}")
    if last == "02" and failures:
        raise StageFailed(f"the rewards failed their test: {failures[0]}")


def execute_notebook(run: Run, stage: str, parameters: Mapping[str, Any]) -> None:
    """Run one notebook in its own kernel, and keep the executed copy in the run.

    Raises:
        StageFailed: A cell raised, the kernel died, the disk is full, or the notebook ended
            before its stage was done.
    """
    source = PROJECT_ROOT / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb"
    target = run / "notebooks" / source.name
    (run / "progress.json").unlink(missing_ok=True)
    set_environment(run)
    before = run.manifest().get(stage, {})
    why, entry = _execute(source, target, parameters), run.manifest().get(stage, {})
    if not why and entry.get("status") == "done" and entry != before:
        return
    why = why or "ended before its last cell, which records the stage as done: was exit() called?"
    note = f"The notebook up to there: {target}"
    if entry != before:  # otherwise the stage did not start, and its earlier results are valid
        run.record(stage, {"status": "failed", "error": why})
    raise StageFailed(f"{NOTEBOOKS[stage]} {why}\n{note}")


def set_environment(run: Run) -> None:
    """Set the environment of child processes: folders, no progress bars, little busy-waiting."""
    limit_spinning()
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(QUIET | {"PYTHONPATH": path, "GRPO_NB_RUNS": str(run.path.parent)})


def _execute(source: Path, target: Path, parameters: Mapping[str, Any]) -> str:
    """Execute a notebook; return why it did not finish, or "" if it did."""
    import papermill
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
        if error.ename == "KeyboardInterrupt":  # SIGTERM, too, interrupts the kernel
            return f"was stopped in cell {error.exec_count}: {error.evalue or 'interrupted'}"
        return f"failed in cell {error.exec_count}: {error.ename}: {error.evalue}"
    except DeadKernelError:
        return KERNEL_ENDED
    except (OSError, RuntimeError) as error:  # such as a full disk, or a kernel that did not start
        return f"was stopped: {error}"
    return ""


def train(
    run: Run, assignments: Sequence[str], processes: int | None = None, force: bool = False
) -> None:
    """Train a run whose rewards were tested.

    Args:
        run: A run whose stages 01 and 02 are done.
        assignments: Settings of stage 03 as `--set` takes them; they override the run's.
        processes: How many processes share each step; None for all that the launcher started.
        force: Whether to start even if an earlier stage has changed, or a check fails.

    Raises:
        ValueError: Before the first step: the number of processes or a setting is wrong, a stage is
            missing, the policy cannot be trained by several processes, or a check failed.
        RuntimeError: The run is in use, or training failed, here or in another process, whose error
            the launcher prints.
        KeyboardInterrupt: A signal stopped training; a checkpoint is kept.
    """
    os.environ.update(QUIET | {"GRPO_NB_RUNS": str(run.path.parent)})
    ranks.start(processes)
    if not ranks.is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process ends
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher prints the first error from it
            sys.stderr = sys.stdout
    settings = configs.of_stage("03", run.settings("03")) | assigned(assignments)
    ranks.recorded(_train)(run, settings, force)
    ranks.end()


def _train(run: Run, settings: Mapping[str, Any], force: bool) -> None:
    try:
        _refuse_processes(resolve_stages(run, settings, "03", "03"))
        notebook = PROJECT_ROOT / f"notebooks/{NOTEBOOKS['03']}.ipynb"
        execute_cells(notebook, {"run_name": run.path, "settings": settings, "force": force})
    except RuntimeError as error:
        if ranks.count() == 1 or not ranks.is_lost_connection(error):
            raise
        time.sleep(SECONDS_TO_BE_ENDED)
        notes = "; ".join(["see its error", *getattr(error, "__notes__", [])])
        raise RuntimeError(f"another process of this run died; {notes}") from error


def execute_cells(notebook: Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook's code cells in this process; no cell shows the value of its last line.

    Args:
        notebook: The notebook; its code uses no magics.
        parameters: Values that replace those of the cell with the tag "parameters".
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in read_json(notebook)["cells"] if cell["cell_type"] == "code"]
    for number, cell in enumerate(cells, 1):
        code = compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec")
        exec(code, names)
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= parameters


def _refuse_processes(settings: configs.RunConfig) -> None:
    """Raise ValueError if several processes cannot train with these settings."""
    if ranks.count() > 1 and settings.policy.backend == "unsloth":
        raise ValueError(
            f"Unsloth trains in one process, and there are {ranks.count()}: start one, or use "
            "--set policy.backend=transformers"
        )
    packed, steps = settings.model.load_in_4bit, settings.train.sft_steps
    if models.sharded() and (packed or steps):
        raise ValueError(
            "FSDP and ZeRO-3 need model.load_in_4bit = False and train.sft_steps = 0, and these "
            f"are {packed} and {steps}: set them, or use ddp.yaml"
        )
