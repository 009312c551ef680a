"""One training shared by several processes: who writes, and how all of them agree.

A launcher starts the processes (torchrun, accelerate launch). Without one there is one, and
every function here does the work and nothing else. `gather` and what uses it have to be called
by all processes, in the same order.
"""

import atexit
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from grpo_nb.models import cuda_available

Result = TypeVar("Result")
HOW = "python -m torch.distributed.run --nproc_per_node {0} -m grpo_nb train … --processes {0}"


def start(expected: int | None) -> None:
    """Join the other processes.

    Args:
        expected: How many there have to be; None: as many as the launcher says.

    Raises:
        ValueError: The world has another size, as where a launcher started copies that know
            nothing of each other, or one process alone.
    """
    from accelerate import PartialState

    cpu = not cuda_available()
    if cpu:  # else a process calls it "cpu:0", and torch cannot load a checkpoint to that
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    # A validation on the first process may take longer than the others wait by default.
    waits = {"timeout": timedelta(minutes=60)} if "RANK" in os.environ else {}
    world = PartialState(cpu=cpu, **waits).num_processes
    wanted = expected or int(os.environ.get("WORLD_SIZE", "1"))
    if world != wanted:
        raise ValueError(
            f"asked for {wanted} processes, and the world has {world}: start them by torchrun, "
            f"that is {HOW.format(wanted)}"
        )


def end() -> None:
    """Of several processes: end this one, once all are done; one alone goes on.

    A thread of gloo that asks for Python while Python ends would abort the process.
    """
    if world := _world():
        gather([])
        world.destroy_process_group()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _world() -> Any:
    """torch.distributed where there are several processes, else None."""
    import torch.distributed as world

    return world if world.is_available() and world.is_initialized() else None


def count() -> int:
    return world.get_world_size() if (world := _world()) else 1


def rank() -> int:
    return world.get_rank() if (world := _world()) else 0


def is_main() -> bool:
    """Whether this process is the one that writes and speaks."""
    return rank() == 0


def is_lost_connection(error: BaseException) -> bool:
    """Whether it only says that another process is gone: gloo's words, or NCCL's own class."""
    from torch.distributed import DistBackendError

    words = ("gloo", "connection closed by peer", "connection reset", "nccl")
    told = any(word in str(error).lower() for word in words)
    return isinstance(error, DistBackendError) or (isinstance(error, RuntimeError) and told)


def gather(values: list[Any]) -> list[Any]:
    """The values of all processes, one after the other."""
    from accelerate.utils import gather_object

    return gather_object(values) if count() > 1 else values


def anywhere(flag: bool) -> bool:
    """Whether it is true on any process."""
    return any(gather([flag]))


def from_main(work: Callable[[], Result]) -> Result:
    """Once all are here the first one does the work, and every one gets what it returned."""
    from accelerate.utils import broadcast_object_list

    if count() == 1:
        return work()
    gather([])
    return broadcast_object_list([work() if is_main() else None])[0]
