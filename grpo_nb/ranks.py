"""Distribute one training run over several processes: one writes, all make the same decisions.

A launcher (torchrun or accelerate launch) starts the processes. Without a launcher there is one
process, and no function here waits. All processes have to call `gather`, and every function that
uses it, in the same order.
"""

import atexit
import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

Result = TypeVar("Result")
_alone: list[bool] = []  # not empty while the first process works for all
HOW = "python -m torch.distributed.run --nproc_per_node {0} -m grpo_nb train … --processes {0}"


def start(expected: int | None) -> None:
    """Join the other processes.

    Args:
        expected: The expected number of processes; None for as many as the launcher started.

    Raises:
        ValueError: The number of processes is not the expected one: the launcher started a single
            process, or several that are not connected.
    """
    import torch
    from accelerate import PartialState

    cpu = not torch.cuda.is_available()
    if cpu:  # the device would be "cpu:0", to which torch cannot load a checkpoint
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # A validation on the first process may take longer than the others wait by default.
    options = {"timeout": timedelta(minutes=60)} if "RANK" in os.environ else {}
    world = PartialState(cpu=cpu, **options).num_processes
    expected = expected or int(os.environ.get("WORLD_SIZE", "1"))
    if world != expected:
        raise ValueError(
            f"expected {expected} processes, but {world} were started: start them with torchrun, "
            f"that is {HOW.format(expected)}"
        )


def end() -> None:
    """End this process once all processes are done, unless it is the only one.

    Python's own shutdown is skipped, because a gloo thread could abort the process during it.
    """
    if world := _world():
        gather([])
        world.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _world() -> Any:
    """Return torch.distributed if there are several processes, else None."""
    world = sys.modules.get("torch.distributed")  # a stage may start before torch is imported
    return world if world and world.is_available() and world.is_initialized() else None


def count() -> int:
    """Return the number of processes."""
    return world.get_world_size() if (world := _world()) else 1


def rank() -> int:
    """Return the number of this process, from 0."""
    return world.get_rank() if (world := _world()) else 0


def is_main() -> bool:
    """Return whether this process is the one that writes and prints."""
    return rank() == 0


def is_lost_connection(error: BaseException) -> bool:
    """Return whether an error of gloo or NCCL only means that another process has ended."""
    from torch.distributed import DistBackendError

    words = ("gloo", "connection closed by peer", "connection reset", "nccl")
    has_word = any(word in str(error).lower() for word in words)
    return isinstance(error, DistBackendError) or (isinstance(error, RuntimeError) and has_word)


def recorded(work: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap the work so that torchrun reports an error with its traceback."""
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(work)


def gather(values: list[Any]) -> list[Any]:
    """Return the values of all processes, in the order of the processes."""
    from accelerate.utils import gather_object

    return gather_object(values) if count() > 1 else values


def anywhere(flag: bool) -> bool:
    """Return whether the flag is true on any process."""
    return any(gather([flag]))


def from_main(work: Callable[[], Result]) -> Result:
    """Wait for all processes, do the work on the first, and return its result on every process.

    Calls of `from_main` within this work do not wait for the other processes.
    """
    if count() == 1 or _alone:
        return work()
    from accelerate.utils import broadcast_object_list

    gather([])
    results: list[Any] = [None]
    if is_main():
        _alone.append(True)
        try:
            results = [work()]
        finally:
            _alone.clear()
    return broadcast_object_list(results)[0]


def by_main(work: Callable[..., Result]) -> Callable[..., Result]:
    """Wrap a function so that only the first process runs it; see `from_main`."""

    @functools.wraps(work)
    def wrapped(*args: Any, **kwargs: Any) -> Result:
        return from_main(functools.partial(work, *args, **kwargs))

    return wrapped
