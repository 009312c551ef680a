"""Run the trials of a sweep, each a process of its own, so that kill -9 loses nothing.

A trial's process holds `runs/<sweep>.sweep/<trial>.lock` from its first instant to its last,
whether or not the driver lives: the driver takes the lock and the process inherits it. Whether
a trial is done stands in its run's own manifest. What a driver knows besides (failures, pid)
it writes to `<trial>.json` before it acts. A new driver therefore finds each trial running,
done, or to be started, and never starts one twice. On a cluster a trial ends with its driver;
until it has, the locks in its run tell.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from grpo_nb import slots
from grpo_nb.batches import refuse_read_only
from grpo_nb.cluster import Cluster, RemoteTrial
from grpo_nb.pipeline import Stopped, log
from grpo_nb.runs import NOTEBOOKS, Run, runs_root, write_json
from grpo_nb.slots import CUT_OFF, in_use, take_lock
from grpo_nb.trials import Sweep, Trial, progress, read_sweep, score, trial_table

__all__ = ["Sweep", "Trial", "read_sweep", "run_sweep", "trial_command", "trial_table"]

POLL = 0.05  # how often the driver looks at its trials [s]
WRONG_INPUT = 2  # exit code: another attempt would end the same


class Running(NamedTuple):
    """A trial at work: a process of this driver, or (None) one that an earlier one left."""

    trial: Trial
    process: subprocess.Popen | RemoteTrial | None
    slot: int


def trial_command(sweep: Sweep, trial: Trial) -> list[str]:
    """`grpo-nb run` from the first stage that is not done."""
    manifest = Run(trial.name).manifest()
    undone = [stage for stage in NOTEBOOKS if manifest.get(stage, {}).get("status") != "done"]
    command = [sys.executable, "-m", "grpo_nb", "run", f"--name={trial.name}"]
    command += [f"--profile={sweep.profile}", f"--from={undone[0]}"]
    return command + [f"--set={name}={value}" for name, value in trial.settings.items()]


def run_sweep(
    sweep: Sweep,
    jobs: int | None = None,
    console: Console | None = None,
    command: Callable[[Sweep, Trial], list[str]] = trial_command,
    place: ModuleType | Cluster = slots,
) -> int:
    """Run every trial that is not done, `jobs` at a time.

    Args:
        jobs: At most one a GPU, where there are any. Default: 1, or all that fit on a cluster.
        command: What starts a trial; it has to leave the manifest of a finished run.
        place: Where trials run: this machine, or the cluster of `grpo_nb.cluster.connected`.

    Returns:
        0 if every trial is done, 1 if some failed more often than `sweep.retries`.

    Raises:
        ValueError: Before anything starts: a directory that belongs to something else, or
            cannot be written; too many jobs.
        RuntimeError: Another driver runs this sweep.
        Stopped: SIGTERM or SIGINT came; trials that ran saved their work.
    """
    driver = _Driver(sweep, place, jobs, console or Console(), command)
    lock = take_lock(driver.folder / "driver.lock")
    if lock is None:
        raise RuntimeError(f"sweep {sweep.name!r} is being run by another process")
    try:
        driver.states = driver.read()  # now that no other driver changes it
        with _forwarding(driver), driver.shown():
            driver.run()
    finally:
        os.close(lock)
    counts = driver.counts()
    if driver.signal and counts["done"] < len(sweep.trials):
        message = f"sweep stopped, {driver.summary()}; the same command goes on"
        raise Stopped(message, driver.signal)
    driver.console.print(f"sweep {sweep.name}: {driver.summary()}")
    driver.console.print(
        f"compare: python -m grpo_nb report {runs_root()}/{sweep.name}-*", soft_wrap=True
    )
    return 1 if counts["failed"] else 0


def finished(run: Run) -> bool:
    manifest = run.manifest()
    return all(manifest.get(stage, {}).get("status") == "done" for stage in NOTEBOOKS)


@contextmanager
def _forwarding(driver: "_Driver") -> Iterator[None]:
    """SIGINT and SIGTERM stop the trials, which save their work, and then the driver."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread():
        numbers = ()  # signals belong to the main thread
    before = {number: signal.signal(number, driver.stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Driver:
    def __init__(
        self,
        sweep: Sweep,
        place: ModuleType | Cluster,
        jobs: int | None,
        console: Console,
        command: Callable[[Sweep, Trial], list[str]],
    ) -> None:
        self.sweep, self.place, self.console, self.command = sweep, place, console, command
        self.folder = runs_root() / f"{sweep.name}.sweep"
        self.signal = 0
        self.running: list[Running] = []
        self.states = self.read()
        refuse_read_only(self.folder)
        self.slots = place.environments(jobs)
        self.folder.mkdir(parents=True, exist_ok=True)

    def _path(self, trial: Trial, ending: str) -> Path:
        return self.folder / f"{trial.name.removeprefix(f'{self.sweep.name}-')}.{ending}"

    def read(self) -> dict[str, dict[str, Any]]:
        return {trial.name: self._read(trial) for trial in self.sweep.trials}

    def _read(self, trial: Trial) -> dict[str, Any]:
        path, run = self._path(trial, "json"), Run(trial.name)
        settings = json.loads(json.dumps(trial.settings))
        asked = {"trial": trial.name, "profile": self.sweep.profile, "settings": settings}
        if not path.exists():
            if run.path.exists():
                raise ValueError(f"{run.path} is not this sweep's: name the sweep otherwise")
            return asked | {"status": "waiting", "failures": 0, "seconds": 0.0}
        known = json.loads(path.read_text(encoding="utf-8"))
        if {key: known[key] for key in asked} != asked:
            raise ValueError(
                f"{path} says that {trial.name} has other settings, {known['settings']}: "
                "name the sweep otherwise"
            )
        return known

    def _note(self, trial: Trial, **changes: Any) -> None:
        self.states[trial.name] |= changes
        write_json(self._path(trial, "json"), self.states[trial.name])

    def counts(self) -> dict[str, int]:
        found = [state["status"] for state in self.states.values()]
        return {name: found.count(name) for name in ("done", "running", "failed", "waiting")}

    def summary(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.counts().items() if count)

    def stop(self, number: int, _: Any) -> None:
        """SIGTERM for all trials at work; no other is started."""
        self.signal = number
        for one in self.running:
            pid = self.states[one.trial.name]["pid"]
            if one.process:
                one.process.terminate()
            elif pid and self._is_alive(one):
                os.kill(pid, signal.SIGTERM)

    def run(self) -> None:
        waiting = deque(self._adopt())
        while self.running or (waiting and not self.signal):
            for one in [one for one in self.running if not self._is_alive(one)]:
                self.running.remove(one)
                if self._judge(one):
                    waiting.append(one.trial)
            used = {one.slot for one in self.running}
            free = deque(slot for slot in range(len(self.slots)) if slot not in used)
            for _ in range(len(waiting)):
                if not free or self.signal:
                    break
                trial = waiting.popleft()
                if finished(Run(trial.name)):
                    self._note(trial, status="done")
                elif self._start(trial, free[0]):
                    free.popleft()
                else:
                    waiting.append(trial)
            time.sleep(POLL)

    def _adopt(self) -> Iterator[Trial]:
        """Trials at work are watched, finished ones noted; the others are to be started."""
        for trial in self.sweep.trials:
            state, lock = self.states[trial.name], None
            if self._path(trial, "lock").exists():
                lock = take_lock(self._path(trial, "lock"))
                if lock is None:
                    self.running.append(Running(trial, None, state.get("slot", 0)))
                    continue
                os.close(lock)
            if finished(Run(trial.name)):
                if state["status"] != "done":
                    self._note(trial, status="done")
            elif state["failures"] <= self.sweep.retries:
                state["status"] = "waiting"
                yield trial

    def _start(self, trial: Trial, slot: int) -> bool:
        """Start a trial, unless its run is in use."""
        lock, run = take_lock(self._path(trial, "lock")), Run(trial.name)
        if lock is None:
            return False
        try:
            if in_use(run):
                return False
            self._note(trial, status="running", slot=slot, pid=None, started=time.time())
            environment, words = self.slots[slot], self.command(self.sweep, trial)
            process = self.place.start(words, self._path(trial, "log"), environment, lock)
        finally:
            os.close(lock)  # the process holds its own copy
        self._note(trial, pid=process.pid)
        self.running.append(Running(trial, process, slot))
        log(
            self.folder, f"{trial.name}: started, attempt {self.states[trial.name]['failures'] + 1}"
        )
        return True

    def _is_alive(self, one: Running) -> bool:
        if one.process:
            return one.process.poll() is None
        lock = take_lock(self._path(one.trial, "lock"))
        if lock is not None:
            os.close(lock)
        return lock is None

    def _judge(self, one: Running) -> bool:
        """Note how a trial ended; returns whether it is to be started again."""
        trial, run, state = one.trial, Run(one.trial.name), self.states[one.trial.name]
        code = one.process.returncode if one.process else CUT_OFF
        seconds = round(state["seconds"] + time.time() - state["started"], 1)
        if finished(run) and code in (0, CUT_OFF):
            self._note(trial, status="done", seconds=seconds)
            self._say(f"{trial.name}: done in {seconds:.0f} s{score(run)}")
            return False
        failed = [entry for entry in run.manifest().values() if entry["status"] == "failed"]
        cut_off = self.signal or (code == CUT_OFF and not failed)
        failures = state["failures"] + (0 if cut_off else 1)
        again = failures <= self.sweep.retries and code != WRONG_INPUT
        why = self._last_words(trial) or f"ended with exit code {code}"
        status = "waiting" if again else "failed"
        self._note(trial, status=status, seconds=seconds, failures=failures, error=why)
        self._say(f"{trial.name}: {'cut off' if cut_off else 'failed'}, now {status}: {why}")
        return again

    def _last_words(self, trial: Trial) -> str:
        lines = self._path(trial, "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.startswith("grpo-nb: ")), "")

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
        table = Table(title=title, title_justify="left")
        for column in ("run", "settings", "at", "seconds"):
            table.add_column(column)
        for one in list(self.running):
            since = time.time() - self.states[one.trial.name]["started"]
            swept = ", ".join(f"{k}={v}" for k, v in one.trial.swept.items())
            table.add_row(one.trial.name, swept, progress(Run(one.trial.name)), f"{since:.0f}")
        return table
