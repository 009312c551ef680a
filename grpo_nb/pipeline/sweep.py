"""Run the trials of a sweep, each a process of its own, so that kill -9 loses nothing.

A trial's process ends with the process that started it: the system sends it SIGTERM, and it
saves its work. Whether a trial is done stands in its run's own manifest, what was asked of it in
the run's settings.json, and whether somebody works on it is told by the run's own lock. So a
new call starts what is neither done nor in use, and there is nothing else to keep.
"""

import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from rich.console import Console

from grpo_nb.machine import gpu_name
from grpo_nb.pipeline.notebooks import Stopped, refuse_read_only, undone
from grpo_nb.pipeline.trials import Sweep, Trial, read_sweep, trial_table
from grpo_nb.runs import PROJECT_ROOT, Run, runs_root
from grpo_nb.runs.files import read_json

__all__ = ["Sweep", "Trial", "read_sweep", "run_sweep", "trial_command", "trial_table"]

POLL = 0.05  # how often the trials are looked at [s]
WRONG_INPUT = 2  # exit code: another attempt would end the same
LOG = "sweep.log"  # in a trial's run: what its process said
Command = Callable[[Sweep, Trial], list[str]]
# Becomes the command that follows, which gets SIGTERM when the process that started it is gone.
ENDS_WITH_STARTER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def ending_with_us(command: Sequence[str]) -> list[str]:
    """The command, made so that it gets SIGTERM when this process ends, however that comes."""
    return [sys.executable, "-S", "-I", "-c", ENDS_WITH_STARTER, str(os.getpid()), *command]


def start(command: Sequence[str], run: Run, environment: Mapping[str, str]) -> subprocess.Popen:
    """A trial's process; what it says is added to the run's sweep.log."""
    run.path.mkdir(parents=True, exist_ok=True)
    with (run / LOG).open("ab") as out:
        return subprocess.Popen(
            ending_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=PROJECT_ROOT,
            env=os.environ | environment,
            start_new_session=True,  # Ctrl-C comes to the driver alone, which ends the trials
        )


def trial_command(sweep: Sweep, trial: Trial) -> list[str]:
    """`grpo-nb run` from the first stage that is not done."""
    command = [sys.executable, "-m", "grpo_nb", "run", f"--name={trial.name}"]
    command += [f"--profile={sweep.profile}", f"--from={undone(Run(trial.name))[0]}"]
    return command + [f"--set={name}={value}" for name, value in trial.settings.items()]


def finished(trial: Trial) -> bool:
    """Whether all stages are done, as the run's manifest says."""
    return not undone(Run(trial.name))


def in_use(trial: Trial) -> bool:
    """Whether a process works on the run, such as a trial that is saving its work."""
    try:
        for name in (".pipeline.lock", ".lock"):
            Run(trial.name).lock(name).release()
    except RuntimeError:
        return True
    return False


def why_failed(trial: Trial, code: int) -> str:
    """The last thing that a trial said about its end."""
    lines = (Run(trial.name) / LOG).read_text(encoding="utf-8", errors="replace").splitlines()
    said = (line for line in reversed(lines) if line.startswith("grpo-nb: "))
    return next(said, f"ended with exit code {code}")


def check_runs(sweep: Sweep) -> None:
    """Raise ValueError where a trial's run was made with other settings, or cannot be written."""
    refuse_read_only(runs_root())
    for trial in sweep.trials:
        run = Run(trial.name)
        if not run.manifest():
            continue
        known, profile = run.settings(), run.config().profile
        if profile != sweep.profile or any(known.get(k) != v for k, v in trial.settings.items()):
            raise ValueError(
                f"{run.path} exists already with other settings, {profile} and "
                f"{known}: give the sweep another name"
            )


class _Running(NamedTuple):
    """A trial at work, and the GPU or processors that it has."""

    trial: Trial
    process: subprocess.Popen
    share: dict[str, str]


def run_sweep(
    sweep: Sweep,
    jobs: int | None = None,
    console: Console | None = None,
    command: Command = trial_command,
) -> int:
    """Run every trial that is not done on this machine, `jobs` at a time.

    Args:
        sweep: What to run.
        jobs: At most one a GPU, where there are any; default: 1.
        console: Where each start and end is told.
        command: What starts a trial; it has to leave the manifest of a finished run.

    Returns:
        0 if every trial is done, 1 if some failed more often than `sweep.retries`.

    Raises:
        ValueError: Before anything starts: a run that was made otherwise; too many jobs.
        Stopped: SIGTERM or SIGINT came; trials that ran saved their work.
    """
    check_runs(sweep)
    console, free = console or Console(), shares(1 if jobs is None else jobs)
    waiting = deque(trial for trial in sweep.trials if not finished(trial))
    running, failures = [], Counter()
    with signals() as came:
        try:
            while (waiting or running) and not came:
                for trial in [waiting.popleft() for _ in range(min(len(free), len(waiting)))]:
                    if finished(trial):
                        continue
                    if in_use(trial):
                        waiting.append(trial)
                    else:
                        say(console, f"{trial.name}: started, attempt {failures[trial.name] + 1}")
                        process = start(command(sweep, trial), Run(trial.name), free[0])
                        running.append(_Running(trial, process, free.pop(0)))
                time.sleep(POLL)
                for ended in [one for one in running if one.process.poll() is not None]:
                    running.remove(ended)
                    free.append(ended.share)
                    if _tell_end(sweep, ended.trial, ended.process.returncode, failures, console):
                        waiting.append(ended.trial)
        finally:  # the trials save their work
            for one in running:
                one.process.terminate()
            for one in running:
                one.process.wait()
    return summarize(sweep, console, came)


def _tell_end(
    sweep: Sweep, trial: Trial, code: int, failures: Counter[str], console: Console
) -> bool:
    """Say how an attempt ended; whether there is to be another."""
    if finished(trial):
        say(console, f"{trial.name}: done{score(Run(trial.name))}")
        return False
    failures[trial.name] += not in_use(trial)  # else another driver had begun it
    again = failures[trial.name] <= sweep.retries and code != WRONG_INPUT
    after = "waiting" if again else "failed"
    say(console, f"{trial.name}: failed, now {after}: {why_failed(trial, code)}")
    return again


def summarize(sweep: Sweep, console: Console, came: Sequence[int]) -> int:
    """Say how many trials are done; the exit code of `run_sweep`."""
    done = sum(map(finished, sweep.trials))
    counts = f"{done} of {len(sweep.trials)} trials are done"
    if came and done < len(sweep.trials):
        raise Stopped(f"sweep stopped, {counts}; the same command goes on", came[0])
    say(console, f"sweep {sweep.name}: {counts}")
    say(console, f"compare: python -m grpo_nb report {runs_root()}/{sweep.name}-*")
    return int(done < len(sweep.trials))


def say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def score(run: Run) -> str:
    """What a finished run ended with, for the line that says so."""
    path = run / "eval/report.json"
    if not path.exists():
        return ""
    *_, last = read_json(path)["greedy"].values()
    return f", held-out accuracy {last['accuracy']:.1%}"


def shares(jobs: int) -> list[dict[str, str]]:
    """What each of `jobs` trials at once gets: a GPU, or a share of the processors.

    Raises:
        ValueError: No job, or more of them than GPUs.
    """
    if jobs < 1:
        raise ValueError(f"--jobs {jobs}: at least 1")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None and gpu_name():
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
        visible = ",".join(str(i) for i in range(listed.stdout.count("GPU ")))
    gpus = [gpu for gpu in (visible or "").split(",") if gpu not in ("", "-1")]
    if gpus and jobs > len(gpus):
        raise ValueError(
            f"--jobs {jobs} with {len(gpus)} GPUs: one trial a GPU, so --jobs {len(gpus)}"
        )
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:jobs]]
    share = max(1, len(os.sched_getaffinity(0)) // jobs)
    return [{"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}] * jobs


@contextmanager
def signals() -> Iterator[list[int]]:
    """The numbers of SIGINT and SIGTERM that came while this is entered; nothing else ends."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
