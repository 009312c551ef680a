"""Execute the many runs of a sweep file, each in its own process, so that kill -9 loses nothing.

    name: rates
    settings: {grpo.max_steps: 100}
    grid: {grpo.learning_rate: [1e-3, 3e-4], seed: [0, 1, 2]}

Instead of `grid`, a file may have `list: [{grpo.beta: 0.01}, …]`. When the process that started a
trial ends, the system sends SIGTERM to the trial, which then saves its work. There is no state
outside the runs: a trial's manifest shows whether it is done, its config.yaml holds its settings,
and its locks show whether a process is working on it. So each call to `run_sweep` starts every
trial that is neither done nor in use.

Without Ray, one trial runs after the other. Ray runs as many at once as fit on its GPUs and
processors: `--ray local` on this machine, `--ray HOST:PORT` on a cluster. It picks the node for
each trial, and repeats it up to three times if its node dies. All nodes share the folder of the
runs, with its locks, under the same path.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from grpo_nb.files import read_yaml
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.names import refuse_unknown
from grpo_nb.pipeline.notebooks import StageFailed, resolve_run, with_full_paths
from grpo_nb.runs import Run, runs_root
from grpo_nb.training.interruptions import signals

LOCKS = (".lock", ".pipeline.lock")
KEYS = ["name", "profile", "settings", "grid", "list"]  # of a sweep file
POLL = 0.05  # time between two polls of the trials [s]
STOPPED = "stopped"
# Python's arguments to run a command that gets SIGTERM when the thread that started it ends.
PRCTL = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15)"  # PR_SET_PDEATHSIG, SIGTERM
EXEC = "os.getppid() == int(sys.argv[1]) and os.execvp(sys.argv[2], sys.argv[2:])"
ENDS_WITH_STARTER = ("-S", "-I", "-c", f"{PRCTL}; {EXEC}")


class Trial(NamedTuple):
    """Define one run of a sweep: `swept` has the settings that vary, and `settings` has all."""

    name: str
    swept: dict[str, Any]
    settings: dict[str, Any]


class Sweep(NamedTuple):
    """Hold the trials of a sweep, in order."""

    name: str
    profile: str
    trials: list[Trial]


Command = Callable[[Sweep, Trial], list[str]]


def read_sweep(path: Path, elsewhere: bool = False) -> Sweep:
    """Read a sweep file, and check each trial as `grpo-nb run` would.

    Args:
        path: The YAML file.
        elsewhere: Whether the trials run on other machines, so that the local GPU is irrelevant.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not YAML, has an unknown key or setting, or varies nothing.
    """
    file = read_yaml(path)
    for key in file:
        refuse_unknown("key of a sweep", key, KEYS)
    grid, points = file.get("grid", {}), file.get("list", [])
    is_grid = isinstance(grid, dict) and all(isinstance(values, list) for values in grid.values())
    is_list = isinstance(points, list) and all(isinstance(point, dict) for point in points)
    if not (is_grid and is_list) or bool(grid and all(grid.values())) == bool(points):
        raise ValueError(
            f"{path}: a sweep needs something to vary: either grid: {{setting: [value, …], …}} or "
            "list: [{setting: value, …}, …]"
        )
    name, profile, trials = file.get("name", path.stem), file.get("profile", "auto"), []
    if elsewhere and profile == "auto":
        raise ValueError(f"{path}: name the cluster's profile: auto would choose one for this host")
    points = points or [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    for number, swept in enumerate(points):  # the last setting varies fastest
        run, common = Run(f"{name}-{number:03}"), file.get("settings", {})
        config, settings = resolve_run(run, profile, with_full_paths(common | swept))
        profile = config.profile  # "auto" chooses for the first trial, and so for all
        trials.append(Trial(run.name, swept, settings))
    return Sweep(name, profile, trials)


def plan(sweep: Sweep) -> str:
    """Return one line per trial with its varied settings."""
    lines = [f"sweep {sweep.name}: {len(sweep.trials)} trials, {sweep.profile}"]
    for trial in sweep.trials:
        lines.append(f"{trial.name}  {', '.join(f'{k} = {v}' for k, v in trial.swept.items())}")
    return "\n".join(lines)


def trial_command(sweep: Sweep, trial: Trial) -> list[str]:
    """Return the `grpo-nb run` command that starts at the first stage that is not done."""
    command = [sys.executable, "-m", "grpo_nb", "run", f"--name={trial.name}"]
    command += [f"--profile={sweep.profile}", f"--from={Run(trial.name).undone()}"]
    return command + [f"--set={name}={value}" for name, value in trial.settings.items()]


def waiting(sweep: Sweep) -> list[Trial]:
    """Return the trials that are not done.

    Raises:
        ValueError: A trial's run exists with other settings.
    """
    for trial in [trial for trial in sweep.trials if Run(trial.name).manifest()]:
        run = Run(trial.name)
        same = trial.settings.items() <= run.settings().items()
        if not same or run.config().profile != sweep.profile:
            raise ValueError(
                f"{run.path} exists and was made with other settings: give the sweep another name"
            )
    return [trial for trial in sweep.trials if Run(trial.name).undone()]


def run_trial(sweep: Sweep, trial: Trial, command: Command, stop: Event) -> str:
    """Run a trial to its end, on this machine or on a cluster's node, and return how it ended.

    The trial waits while another process is working on the run. Once `stop` is set, it saves its
    work and ends. Its output is in the run's sweep.log.
    """
    run = Run(trial.name)
    while run.in_use(*LOCKS) and not stop.wait(POLL):
        pass
    if stop.is_set() or not run.undone():
        return "done" if not run.undone() else STOPPED
    run.path.mkdir(exist_ok=True)
    with (run / "sweep.log").open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, *ENDS_WITH_STARTER, str(os.getpid()), *command(sweep, trial)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=PROJECT_ROOT,
            env=os.environ | {"GRPO_NB_RUNS": str(run.path.parent)},
            start_new_session=True,  # only the driver gets Ctrl-C, and it ends the trials
        )
    try:
        while process.poll() is None and not stop.wait(POLL):
            pass
    finally:
        process.terminate()
        code = process.wait()
    if stop.is_set() or not run.undone():
        return STOPPED if run.undone() else "done"
    lines = (run / "sweep.log").read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("grpo-nb: ")]
    return f"failed: {(errors or [f'ended with exit code {code}'])[-1]}"


def run_sweep(sweep: Sweep, command: Command = trial_command, ray: str = "") -> int:
    """Run every unfinished trial, and print how each ended.

    Args:
        sweep: The sweep to run.
        command: Returns the command of a trial, which must write the manifest of a finished run.
        ray: HOST:PORT of a Ray cluster's head, "auto" for the cluster of this machine, or "local"
            to start one here; "" runs one trial after the other.

    Returns:
        0 if every trial is done, else 1.

    Raises:
        ValueError: Before anything starts: a run exists with other settings, Ray is not installed,
            or no cluster can be reached.
        StageFailed: SIGTERM or SIGINT was received; running trials saved their work.
    """
    stop, trials = Event(), waiting(sweep)
    runs_root().mkdir(parents=True, exist_ok=True)
    with signals(stop.set) as received:
        outcomes = (
            _on_ray(sweep, trials, ray, command, stop)
            if ray
            else ((trial.name, run_trial(sweep, trial, command, stop)) for trial in trials)
        )
        for name, outcome in outcomes:
            if outcome != STOPPED:
                print(f"{name}: {outcome}", flush=True)
    rest = sum(bool(Run(trial.name).undone()) for trial in sweep.trials)
    counts = f"{len(sweep.trials) - rest} of {len(sweep.trials)} trials are done"
    if received and rest:
        raise StageFailed(f"sweep stopped, {counts}; the same command continues it", received[0])
    print(f"sweep {sweep.name}: {counts}")
    print(f"compare: python -m grpo_nb report {runs_root()}/{sweep.name}-*")
    return int(rest > 0)


def _on_ray(
    sweep: Sweep, trials: list[Trial], address: str, command: Command, stop: Event
) -> Iterator[tuple[str, str]]:
    """Run the trials on a Ray cluster, as many at once as fit; yield how each ended."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray

        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except ImportError:
        raise ValueError("--ray needs Ray on all nodes: pip install ray==2.60.0") from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ValueError(f"--ray {address}: no cluster can be reached: {error}") from None
    gpus, root = int(ray.cluster_resources().get("GPU", 0) > 0), str(runs_root().resolve())
    print(f"Ray cluster {address}: 1 CPU and {gpus} GPU for each trial; runs in {root}", flush=True)
    task = ray.remote(_run_on_node).options(num_cpus=1, num_gpus=gpus)
    names = {task.remote(root, sweep, each, command): each.name for each in trials}
    pending = list(names)
    while pending and not stop.is_set():
        ended, pending = ray.wait(pending, timeout=1)
        for ref in ended:
            try:
                yield names[ref], ray.get(ref)
            except ray.exceptions.RayError as error:  # the cause is its last line
                yield names[ref], f"failed: {str(error).strip().splitlines()[-1]:.300}"
    ray.shutdown()  # a trial that is running saves its work and ends


def _run_on_node(root: str, *trial: Any) -> str:
    """Run a trial on a node until it ends or Ray cancels it, and return how it ended."""
    os.environ["GRPO_NB_RUNS"] = root
    return run_trial(*trial, Event())
