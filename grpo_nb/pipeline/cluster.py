"""Run sweeps on a running Ray cluster, with one Ray task per trial.

Ray picks the node for each task, and retries a task up to three times if its node dies. On a node,
`sweep.run_trial` starts at the first stage that is not done. All nodes share the folder of the
runs, with its locks, under the same path.
"""

import logging
import os
import signal
import socket
from threading import Event
from typing import Any

from grpo_nb.pipeline import sweep as sweeps
from grpo_nb.pipeline.sweep import Command, Sweep, Trial
from grpo_nb.runs import runs_root

PATIENCE = 5  # time limit for reaching the cluster [s]


def run_sweep(sweep: Sweep, address: str, command: Command = sweeps.trial_command) -> int:
    """Run every unfinished trial on the cluster, as many at once as fit; print how each ended.

    Args:
        sweep: The sweep to run.
        address: HOST:PORT of the cluster's head, or "auto" for the cluster of this machine.
        command: The command of a trial, as `sweep.run_sweep` takes it.

    Returns:
        The exit code, as `sweep.run_sweep` returns it. That function's errors are raised here too.

    Raises:
        ValueError: Ray is not installed, or no cluster can be reached.
    """
    trials = sweeps.waiting(sweep)
    ray, root, received = _connect(address), runs_root(), []
    gpus = int(ray.cluster_resources().get("GPU", 0) > 0)
    print(f"Ray cluster {address}: 1 CPU and {gpus} GPU for each trial; runs in {root}", flush=True)
    root.mkdir(parents=True, exist_ok=True)
    task = ray.remote(_work).options(num_cpus=1, num_gpus=gpus)
    names = {task.remote(str(root.resolve()), command, sweep, each): each.name for each in trials}
    pending = list(names)
    try:
        while pending:
            [ref], pending = ray.wait(pending)
            try:
                outcome = ray.get(ref)
            except ray.exceptions.RayError as error:
                outcome = f"failed: {_in_short(error)}"
            print(f"{names[ref]}: {outcome}", flush=True)
    except KeyboardInterrupt:
        received = [signal.SIGINT]
    ray.shutdown()  # a trial that is running saves its work and ends
    return sweeps.summarize(sweep, received)


def _connect(address: str) -> Any:
    """Connect to the cluster and return the module `ray`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray on all nodes: pip install ray==2.60.0") from None
    try:
        if address != "auto":  # Ray itself would keep trying for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), PATIENCE).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray {address}: no cluster can be reached ({_in_short(error)}): give HOST:PORT of "
            "a cluster that this machine belongs to, or start one with `ray start --head`"
        ) from None
    return ray


def _work(root: str, command: Command, sweep: Sweep, trial: Trial) -> str:
    """Run a trial on a node until it ends or Ray cancels it, and return how it ended.

    Raises:
        ValueError: The node has no access to the folder of the runs.
    """
    os.environ["GRPO_NB_RUNS"] = root
    if not os.access(root, os.W_OK):
        raise ValueError(
            f"node {socket.gethostname()} does not see {root}, or cannot write it: set "
            "GRPO_NB_RUNS to a folder on a path that all nodes share"
        )
    return sweeps.run_trial(sweep, trial, command, {}, Event())


def _in_short(error: Exception) -> str:
    """Return the last line of an error, where Ray puts the cause."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]
