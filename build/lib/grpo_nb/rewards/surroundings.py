"""Restore the state that a reward or a tool shares with the trainer, after each call.

Otherwise a reward that seeds torch would make the policy sample the same completions at every step.
Each call has its own random numbers. While one thread of a process trains, no other thread may call
a reward: a thread that trains or calls rewards must hold the lock `turn`.
"""

import io
import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

turn = threading.Lock()
_calls = count()


@contextmanager
def kept(seed: str = "") -> Iterator[None]:
    """Restore random states, the working directory, and torch's dtype and grad mode afterwards.

    Args:
        seed: The seed of the block's random numbers; by default each block gets different ones.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    with ExitStack() as stack:
        folder = os.open(".", os.O_RDONLY)  # stays valid if the folder is deleted, unlike a path
        stack.callback(os.close, folder)
        stack.callback(os.fchdir, folder)
        stack.callback(random.setstate, random.getstate())
        random.seed(seed or f"call {next(_calls)}")
        if numpy:
            stack.callback(numpy.random.set_state, numpy.random.get_state())
            numpy.random.seed(random.getrandbits(32))
        if torch:
            gpus = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
            stack.enter_context(torch.random.fork_rng(range(gpus)))
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            torch.default_generator.manual_seed(random.getrandbits(63))
        yield


class Muted(io.StringIO):
    """Hide the output of the thread that creates this stream; other threads print as before."""

    def __init__(self) -> None:
        super().__init__()
        self.stream, self.thread = sys.stdout, threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text to `sys.stdout`, unless this thread is muted."""
        return len(text) if threading.get_ident() == self.thread else self.stream.write(text)
