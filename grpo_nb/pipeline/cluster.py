"""The trials of a sweep as tasks on a Ray cluster that runs already.

Ray chooses the node of a task, and repeats one that was lost with its node, three times; on the
node it is `sweep.run_trial`, which begins at the first stage that is not done. All nodes see the
runs, and their locks, below one path.
"""

import logging
import os
import socket
import time
from threading import Event
from typing import Any

from rich.console import Console

from grpo_nb.pipeline import sweep as sweeps
from grpo_nb.pipeline.sweep import Command, Sweep, Trial
from grpo_nb.runs import runs_root
from grpo_nb.runs.signals import signals

PATIENCE = 5  # until a cluster counts as out of reach [s]


def run_sweep(
    sweep: Sweep, address: str, console: Console, command: Command = sweeps.trial_command
) -> int:
    """Run every trial that is not done on the cluster, as many at once as fit.

    Args:
        sweep: What to run.
        address: HOST:PORT of the cluster's head, or "auto": the one that this machine belongs to.
        console: Where each end is told.
        command: As `sweep.run_sweep` takes it; returns and raises as that.

    Raises:
        ValueError: Ray is not installed, or no cluster answers.
    """
    trials, stop = sweeps.waiting(sweep), Event()
    ray, root = _connected(address), runs_root()
    share = {"num_cpus": 1, "num_gpus": int(ray.cluster_resources().get("GPU", 0) > 0)}
    gets = "{num_cpus} CPU and {num_gpus} GPU".format(**share)
    sweeps.say(console, f"Ray cluster {address}: {gets} for each trial; runs in {root}")
    root.mkdir(parents=True, exist_ok=True)
    task = ray.remote(_work).options(**share)
    left = {task.remote(str(root.resolve()), command, sweep, trial): trial for trial in trials}
    with signals(stop.set) as came:
        while left and not stop.is_set():
            ended, _ = ray.wait(list(left), timeout=sweeps.POLL)
            for one in ended:
                try:
                    how = ray.get(one)
                except ray.exceptions.RayError as error:
                    how = f"failed: {_in_short(error)}"
                sweeps.say(console, f"{left.pop(one).name}: {how}")
        for one in left:
            ray.cancel(one)
        while any(map(sweeps.in_use, left.values())):  # they save their work
            time.sleep(sweeps.POLL)
    ray.shutdown()
    return sweeps.summarize(sweep, console, came)


def _connected(address: str) -> Any:
    """Ray's module, in the cluster."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray on all nodes: pip install ray==2.60.0") from None
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
    return ray


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


def _in_short(error: Exception) -> str:
    """The line of an error that says what it was: Ray puts the cause last."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
