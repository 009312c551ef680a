"""What a trial gets of the machine: a GPU or a share of the processors, and a lock it inherits."""

import fcntl
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from grpo_nb.profiles import gpu_name
from grpo_nb.runs import Run

CUT_OFF = os.EX_TEMPFAIL  # stands for an exit code that nobody saw


def environments(jobs: int | None) -> list[dict[str, str]]:
    """For each job its GPU, or its share of the processors.

    Raises:
        ValueError: No job, or more of them than GPUs.
    """
    jobs = 1 if jobs is None else jobs
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


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str], lock: int
) -> subprocess.Popen:
    """Start a trial's process, which holds `lock` until it ends and adds what it says to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | environment,
            pass_fds=(lock,),
            start_new_session=True,  # Ctrl-C comes to the driver, which forwards it
        )


def take_lock(path: Path) -> int | None:
    """Take a lock: a descriptor that holds it until it and all copies are closed; None if held."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def in_use(run: Run) -> bool:
    """Whether someone works in the run's directory, such as a kernel that outlived its run."""
    for path in [run / name for name in (".pipeline.lock", ".lock") if (run / name).exists()]:
        try:
            with FileLock(path, timeout=0):
                pass
        except Timeout:
            return True
    return False
