"""Run the trials of a sweep, each a process of its own, so that kill -9 loses nothing.

A trial's process ends with its driver: the system sends it SIGTERM, and it saves its work.
Whether a trial is done stands in its run's own manifest, and whether it is still at work is told
by its run's own locks. So a new driver starts what is neither. `runs/<sweep>.sweep` holds what
was planned (plan.json), what each trial said (000.log), and what happened (log.txt).
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.live import Live
from rich.table import Table

from grpo_nb.machine import gpu_name
from grpo_nb.pipeline.notebooks import Stopped, log, refuse_read_only, undone
from grpo_nb.pipeline.trials import Sweep, Trial, progress, read_sweep, score, trial_table, words
from grpo_nb.runs import PROJECT_ROOT, Run, runs_root
from grpo_nb.runs.files import read_json, write_json

if TYPE_CHECKING:
    from grpo_nb.pipeline.cluster import Cluster

__all__ = ["Sweep", "Trial", "read_sweep", "run_sweep", "trial_command", "trial_table"]

POLL = 0.05  # how often a trial is looked at [s]
WRONG_INPUT = 2  # exit code: another attempt would end the same
CUT_OFF = os.EX_TEMPFAIL  # stands for the exit code of a trial that was lost with its node
# Becomes the command that follows, which gets SIGTERM when the process that started it is gone.
ENDS_WITH_STARTER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ThisMachine:
    """One GPU a trial, or a share of the processors."""

    def environments(self, jobs: int | None) -> list[dict[str, str]]:
        """What each of `jobs` trials at once gets beside the driver's environment.

        Raises:
            ValueError: No job, or more of them than GPUs.
        """
        jobs = 1 if jobs is None else jobs
        if jobs < 1:
            raise ValueError(f"--jobs {jobs}: at least 1")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is None and gpu_name():
            listed = subprocess.run(
                ["nvidia-smi", "-L"], capture_output=True, text=True, check=True
            )
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

    def run(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], came: list[int]
    ) -> int:
        """Run a trial to its end, add what it says to `log`; returns its exit code.

        Args:
            came: Signals, each of which is handed on as SIGTERM when it has come.
        """
        starter = [sys.executable, "-S", "-I", "-c", ENDS_WITH_STARTER, str(os.getpid())]
        with log.open("ab") as out:
            process = subprocess.Popen(
                [*starter, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=PROJECT_ROOT,
                env=os.environ | environment,
                start_new_session=True,  # Ctrl-C comes to the driver, which forwards it
            )
        told = 0
        while process.poll() is None:
            if len(came) > told:
                process.terminate()
                told = len(came)
            time.sleep(POLL)
        return process.returncode


@contextmanager
def signals() -> Iterator[list[int]]:
    """The numbers of SIGINT and SIGTERM that came while this is entered; nothing else ends."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()  # signals belong to the main thread
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def trial_command(sweep: Sweep, trial: Trial) -> list[str]:
    """`grpo-nb run` from the first stage that is not done."""
    command = [sys.executable, "-m", "grpo_nb", "run", f"--name={trial.name}"]
    command += [f"--profile={sweep.profile}", f"--from={undone(Run(trial.name))[0]}"]
    return command + [f"--set={name}={value}" for name, value in trial.settings.items()]


def run_sweep(
    sweep: Sweep,
    jobs: int | None = None,
    console: Console | None = None,
    command: Callable[[Sweep, Trial], list[str]] = trial_command,
    place: "ThisMachine | Cluster | None" = None,
) -> int:
    """Run every trial that is not done, `jobs` at a time.

    Args:
        jobs: At most one a GPU, where there are any. Default: 1, or all that fit on a cluster.
        command: What starts a trial; it has to leave the manifest of a finished run.
        place: Default: this machine; or the cluster of `cluster.connected`.

    Returns:
        0 if every trial is done, 1 if some failed more often than `sweep.retries`.

    Raises:
        ValueError: Before anything starts: a directory that belongs to something else, or
            cannot be written; too many jobs.
        RuntimeError: Another driver runs this sweep.
        Stopped: SIGTERM or SIGINT came; trials that ran saved their work.
    """
    place, folder = place or ThisMachine(), runs_root() / f"{sweep.name}.sweep"
    _plan(sweep, folder)
    refuse_read_only(folder)
    environments = place.environments(jobs)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise RuntimeError(f"sweep {sweep.name!r} is being run by another process") from None
    with lock, signals() as came:
        write_json(folder / "plan.json", _plan(sweep, folder))
        driver = _Driver(sweep, folder, place, console or Console(), command, came)
        with driver.shown(), ThreadPoolExecutor(len(environments)) as pool:
            list(pool.map(driver.work, environments))
    if came and driver.count("done") < len(sweep.trials):
        message = f"sweep stopped, {driver.summary()}; the same command goes on"
        raise Stopped(message, came[0])
    driver.console.print(f"sweep {sweep.name}: {driver.summary()}")
    driver.console.print(
        f"compare: python -m grpo_nb report {runs_root()}/{sweep.name}-*", soft_wrap=True
    )
    return 1 if driver.count("failed") else 0


def _plan(sweep: Sweep, folder: Path) -> dict[str, Any]:
    """Profile and settings of each trial, those of earlier calls too, whose runs it may go on with.

    Raises:
        ValueError: A trial was planned otherwise, or its run is not this sweep's.
    """
    path = folder / "plan.json"
    plan = read_json(path) if path.exists() else {}
    for trial in sweep.trials:
        settings = json.loads(json.dumps(trial.settings))
        asked, run = {"profile": sweep.profile, "settings": settings}, Run(trial.name)
        if trial.name not in plan and run.path.exists():
            raise ValueError(f"{run.path} is not this sweep's: name the sweep otherwise")
        known = plan.setdefault(trial.name, asked)
        if known != asked:
            raise ValueError(
                f"{path} says that {trial.name} has other settings, {known['settings']} with "
                f"{known['profile']}: name the sweep otherwise"
            )
    return plan


def finished(run: Run) -> bool:
    return not undone(run)


def in_use(run: Run) -> bool:
    """Whether someone works in the run's directory, such as a trial that is saving its work."""
    for path in [run / name for name in (".pipeline.lock", ".lock") if (run / name).exists()]:
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
    return False


class _Driver:
    """What the threads of one call share; each of them runs one trial at a time."""

    def __init__(
        self,
        sweep: Sweep,
        folder: Path,
        place: "ThisMachine | Cluster",
        console: Console,
        command: Callable[[Sweep, Trial], list[str]],
        came: list[int],
    ) -> None:
        self.sweep, self.folder, self.place, self.console = sweep, folder, place, console
        self.command, self.came = command, came
        self.waiting = deque(sweep.trials)
        self.states = dict.fromkeys((trial.name for trial in sweep.trials), "waiting")
        self.failures: Counter[str] = Counter()
        self.running: dict[str, tuple[Trial, float]] = {}  # with the time of its start

    def count(self, state: str) -> int:
        return list(self.states.values()).count(state)

    def summary(self) -> str:
        counts = {name: self.count(name) for name in ("done", "running", "failed", "waiting")}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    def work(self, environment: Mapping[str, str]) -> None:
        """Run one trial after the other, until none waits or a signal came."""
        try:
            while not self.came and (trial := self._next()):
                if finished(Run(trial.name)):
                    self.states[trial.name] = "done"
                elif in_use(Run(trial.name)):
                    self.waiting.append(trial)
                    time.sleep(POLL)
                else:
                    self._attempt(trial, environment)
        except BaseException:
            self.came.append(signal.SIGTERM)  # the others save their work and end
            raise

    def _next(self) -> Trial | None:
        try:
            return self.waiting.popleft()
        except IndexError:
            return None

    def _attempt(self, trial: Trial, environment: Mapping[str, str]) -> None:
        name, started = trial.name, time.time()
        path = self.folder / f"{name.removeprefix(f'{self.sweep.name}-')}.log"
        self.states[name], self.running[name] = "running", (trial, started)
        log(self.folder, f"{name}: started, attempt {self.failures[name] + 1}")
        code = self.place.run(self.command(self.sweep, trial), path, environment, self.came)
        del self.running[name]
        if finished(Run(name)):
            self.states[name] = "done"
            self._say(f"{name}: done in {time.time() - started:.0f} s{score(Run(name))}")
            return
        cut_off = self.came or code == CUT_OFF
        self.failures[name] += 0 if cut_off else 1
        again = self.failures[name] <= self.sweep.retries and code != WRONG_INPUT
        self.states[name] = "waiting" if again else "failed"
        why = _last_words(path) or f"ended with exit code {code}"
        self._say(f"{name}: {'cut off' if cut_off else 'failed'}, now {self.states[name]}: {why}")
        if again:
            self.waiting.append(trial)

    def _say(self, text: str) -> None:
        log(self.folder, text)
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def shown(self) -> Live:
        """A table of the trials at work, kept up to date while it is entered."""
        return Live(
            console=self.console, get_renderable=self._view, refresh_per_second=2, transient=True
        )

    def _view(self) -> Table:
        title = f"sweep {self.sweep.name}: {self.summary()}"
        table = Table("run", "settings", "at", "seconds", title=title, title_justify="left")
        for trial, started in list(self.running.values()):
            table.add_row(
                trial.name,
                words(trial.swept),
                progress(Run(trial.name)),
                f"{time.time() - started:.0f}",
            )
        return table


def _last_words(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.startswith("grpo-nb: ")), "")
