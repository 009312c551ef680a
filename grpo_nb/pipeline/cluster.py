"""The trials of a sweep on a Ray cluster that runs already.

A trial is a Ray task that starts the trial's command on its node and waits for it. Ray chooses
the node and says when it is lost; `sweep` decides what then, as for any trial. Ray's own
retries are off: they would repeat the stages that are done, and run for ever what does not fit
in a node's memory. All nodes see the runs and their locks below one path, which is tried first.
"""

import fcntl
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from grpo_nb.pipeline.sweep import CUT_OFF, POLL, ThisMachine, signals
from grpo_nb.runs import runs_root

PATIENCE = {"connect": 5, "probe": 60}  # until a cluster, a node counts as out of reach [s]


class Cluster(NamedTuple):
    """A cluster, and what each trial gets of it."""

    address: str
    cpus: int
    gpus: int
    room: dict[str, int]  # trials that fit on a node, by its id

    def describe(self) -> str:
        share = f"{self.cpus} CPU and {self.gpus} GPU"
        found = f"{len(self.room)} node(s) for {sum(self.room.values())} trials at once"
        return f"Ray cluster {self.address}: {found}, each with {share}; runs in {runs_root()}"

    def environments(self, jobs: int | None) -> list[dict[str, str]]:
        """What `jobs` trials at once get beside what Ray gives them; by default all that fit.

        Raises:
            ValueError: Too many jobs, or a node that does not see the runs.
        """
        most = sum(self.room.values())
        jobs = most if jobs is None else jobs
        if not 1 <= jobs <= most:
            raise ValueError(f"--jobs {jobs}: from 1 to the {most} that fit on the cluster")
        self._check_shared()
        return [{"GRPO_NB_RUNS": str(runs_root().resolve())}] * jobs

    def _check_shared(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        runs_root().mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=runs_root().resolve(), prefix=".shared-") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            for node in self.room:
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                probe = ray.remote(num_cpus=0, max_retries=0)(_look)
                try:
                    task = probe.options(scheduling_strategy=there).remote(held.name)
                    seen = ray.get(task, timeout=PATIENCE["probe"])
                except ray.exceptions.RayError as error:
                    seen = f"cannot run what a trial needs: {_in_short(error)}"
                if seen:
                    raise ValueError(
                        f"a node of the cluster {seen}: the project and {runs_root()} have to be "
                        "on a path that all nodes share; set GRPO_NB_RUNS to such a folder"
                    )

    def run(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str], came: list[int]
    ) -> int:
        """Run a trial where there is room; CUT_OFF if it was lost with its node."""
        import ray

        share = {"num_cpus": self.cpus, "num_gpus": self.gpus, "max_retries": 0}
        task = ray.remote(**share)(_work).remote(list(command), log.resolve(), environment)
        told = 0
        while not ray.wait([task], timeout=POLL)[0]:
            if len(came) > told:
                ray.cancel(task)
                told = len(came)
        try:
            return ray.get(task)
        except ray.exceptions.TaskCancelledError:  # before it had begun
            return 128 + signal.SIGTERM
        except ray.exceptions.RayError as error:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"grpo-nb: {_in_short(error)}\n")
            lost = (ray.exceptions.NodeDiedError, ray.exceptions.WorkerCrashedError)
            return CUT_OFF if isinstance(error, lost) else 1


@contextmanager
def connected(address: str, cpus: int = 1, gpus: int | None = None) -> Iterator[Cluster]:
    """Enter the cluster at `address`, from one of its machines.

    Args:
        address: HOST:PORT of its head, or "auto": the one that this machine belongs to.
        gpus: For a trial; default: 1 where the cluster has any.

    Raises:
        ValueError: Ray is not installed, no cluster answers, or no node has as much as that.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ImportError:
        raise ValueError("--ray needs Ray on all nodes: pip install ray==2.60.0") from None
    if cpus < 1 or (gpus or 0) < 0:
        raise ValueError(f"--cpus {cpus} --gpus {gpus}: at least 1 and 0")
    try:
        if address != "auto":  # Ray itself would try for minutes
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), PATIENCE["connect"]).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"--ray {address}: no cluster can be reached ({_in_short(error)}): write HOST:PORT of "
            "one that this machine is part of, or start one by `ray start --head`"
        ) from None
    try:
        yield _sized(address, cpus, gpus)
    finally:
        ray.shutdown()


def _sized(address: str, cpus: int, gpus: int | None) -> Cluster:
    import ray

    nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
    if gpus is None:
        gpus = int(any(has.get("GPU") for has in nodes.values()))
    asked = {"CPU": cpus, "GPU": gpus}
    room = {
        node: min(int(has.get(name, 0) // need) for name, need in asked.items() if need)
        for node, has in nodes.items()
    }
    if not any(room.values()):
        found = " or ".join(
            f"{has.get('CPU', 0):g} and {has.get('GPU', 0):g}" for has in nodes.values()
        )
        raise ValueError(
            f"no node has {cpus} CPU and {gpus} GPU for a trial, but {found}: lower --cpus, --gpus"
        )
    return Cluster(address, cpus, gpus, {node: count for node, count in room.items() if count})


def _in_short(error: Exception) -> str:
    """The line of an error that says what it was: Ray puts the cause last."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:300]


def _look(path: str) -> str:
    """What the node that this runs on lacks of a file that the driver has locked."""
    if not os.access(path, os.W_OK):
        return f"does not see {path}, or cannot write it"
    with Path(path).open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ""
    return f"does not see that {path} is locked (file locks of the shared disk are off)"


def _work(command: list[str], log: Path, environment: dict[str, str]) -> int:
    """On a node: run a trial's command with that node's Python; returns its exit code."""
    with signals() as came:  # Ray cancels by SIGINT's handler
        return ThisMachine().run([sys.executable, *command[1:]], log, environment, came)
