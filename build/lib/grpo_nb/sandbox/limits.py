"""Limit the time, memory, output and processes of a generated program."""

from typing import NamedTuple

START_SECONDS = 20.0  # how long a sandbox may take to start, even on a busy machine
FILE_BYTES = 1 << 20  # largest file a program may write; its /tmp holds 16 of them


class Limits(NamedTuple):
    """Limit what one program may use.

    Attributes:
        seconds: Wall-clock time of all its tests together, from the start of its code.
        memory_mib: Address space of each of its processes, not of all together.
        output_bytes: How much it may return in one test, and how much it may print: in one test
            with stdin_stdout or in monty, otherwise in all tests together.
        processes: Processes and threads at one time; monty always has one.
    """

    seconds: float = 2.0
    memory_mib: int = 512
    output_bytes: int = 64 * 1024
    processes: int = 16


DEFAULT_LIMITS = Limits()
