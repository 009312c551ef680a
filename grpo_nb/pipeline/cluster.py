"""The trials of a sweep as tasks on a Ray cluster that runs already.

Ray chooses the node of a task, and repeats one that was lost with its node (`max_retries`); on the
node it is `sweep.run_trial`, which begins at the first stage that is not done. All nodes see the
runs, and their locks, below one path.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import NamedTuple

from rich.console import Console

from grpo_nb.pipeline import sweep as sweeps
from grpo_nb.pipeline.sweep import Command, Sweep, Trial
from grpo_nb.runs import runs_root

PATIENCE = 5  # until a cluster counts as out of reach [s]


class Cluster(NamedTuple):
    """A cluster, and what each trial gets of it."""

    address: str
    cpus: int
    gpus: int

    def describe(self) -> str:
        """A line for `--dry-run`."""
        share = f"{self.cpus} CPU and {self.gpus} GPU"
        return f"Ray cluster {self.address}: {share} for each trial; runs in {runs_root()}"

    def run_sweep(
        self, sweep: Sweep, console: Console | None = None, command: Command = sweeps.trial_command
    ) -> int:
        """Run every trial that is not done, as many at once as fit; as `sweep.run_sweep`."""
        import ray

        console, trials = console or Console(), sweeps.waiting(sweep)
        runs_root().mkdir(parents=True, exist_ok=True)
        share = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": sweep.retries}
        task, root = ray.remote(_work).options(**share), str(runs_root().resolve())
        left = {task.remote(root, command, sweep, trial): trial for trial in trials}
        stop = Event()
        with sweeps.signals(stop.set) as came:
            while left and not stop.is_set():
                ended, _ = ray.wait(list(left), timeout=sweeps.POLL)
                for one in ended:
                    sweeps.say(console, f"{left.pop(one).name}: {_ending(one)}")
            for one in left:
                ray.cancel(one)
            while any(map(sweeps.in_use, left.values())):  # they save their work
                time.sleep(sweeps.POLL)
        return sweeps.summarize(sweep, console, came)


@contextmanager
def connected(address: str, cpus: int | None = None, gpus: int | None = None) -> Iterator[Cluster]:
    """Enter the cluster at `address`, from one of its machines.

    Args:
        address: HOST:PORT of its head, or "auto": the one that this machine belongs to.
        cpus: For a trial; default: 1.
        gpus: For a trial; default: 1 where the cluster has any.

    Raises:
        ValueError: Ray is not installed, no cluster answers, or no node has as much as that.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray on all nodes: pip install ray==2.60.0") from None
    cpus = 1 if cpus is None else cpus
    if cpus < 1 or (gpus or 0) < 0:
        raise ValueError(f"--cpus {cpus} --gpus {gpus}: at least 1 and 0")
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), PATIENCE).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray {address}: no cluster can be reached ({_in_short(error)}): write HOST:PORT of "
            "one that this machine is part of, or start one by `ray start --head`"
        ) from None
    try:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = int(any(node.get("GPU") for node in nodes)) if gpus is None else gpus
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
            raise ValueError(
                f"no node has {cpus} CPU and {gpus} GPU for a trial: lower --cpus, --gpus"
            )
        yield Cluster(address, cpus, gpus)
    finally:
        ray.shutdown()


def _work(root: str, command: Command, sweep: Sweep, trial: Trial) -> str:
    """On a node: run a trial to its end, which comes early where Ray cancels it; how it ended.

    Raises:
        ValueError: There are no runs on this node.
    """
    os.environ["GRPO_NB_RUNS"] = root
    if not os.access(root, os.W_OK):
        raise ValueError(
            f"node {socket.gethostname()} does not see {root}, or cannot write it: set "
            "GRPO_NB_RUNS to a folder on a path that all nodes share"
        )
    return sweeps.run_trial(sweep, trial, command, {}, Event())


def _ending(task: object) -> str:
    import ray

    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:
        return f"failed: {_in_short(error)}"


def _in_short(error: Exception) -> str:
    """The line of an error that says what it was: Ray puts the cause last."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
