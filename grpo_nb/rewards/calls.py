"""Call rewards from anywhere as TRL does, and leave the process as it was.

A reward that seeds torch would otherwise make the policy sample the same completions at every step,
and one that calls `sys.exit()` would look like a success. Nothing else is guarded against here,
because `check_rewards` names rewards that hang or that change other things.
"""

import asyncio
import inspect
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

FREE = (signal.SIG_DFL, signal.SIG_IGN, None)  # handlers of SIGALRM that may be replaced
AGAIN = 1.0  # seconds after which a reward that caught the interruption is interrupted again
_calls = count()


class TookTooLong(RuntimeError):
    """Report that a reward was stopped at its time limit."""


class _Overdue(BaseException):
    """Stop a reward from inside; the reward's own `except Exception` does not catch this."""


def call(reward_func: Callable[..., Any], /, **columns: Any) -> list[float | None]:
    """Return the scores of any reward in TRL's shape, even of an async one in a notebook.

    Random states and the working directory are restored afterwards (`kept`).
    """
    return run(reward_func, 0.0, columns)


def run(
    reward_func: Callable[..., Any], seconds: float, columns: dict[str, Any], seed: str = ""
) -> list[float | None]:
    """Return the scores of any reward in TRL's shape, with a time limit for the whole call.

    Args:
        reward_func: The reward.
        seconds: The limit; 0 for no limit. An async reward has no limit.
        columns: The keyword arguments.
        seed: The seed of the call's random numbers; by default each call gets different ones.

    Raises:
        TypeError: The reward needs an argument that `columns` lacks.
        ValueError: The reward did not return a list.
        TookTooLong: The call took longer than `seconds`.
    """
    func = getattr(reward_func, "__self__", reward_func)  # it may be a Reward's method `explain`
    name = getattr(func, "__name__", type(func).__name__)
    with kept(seed), contained(name):
        scores = limited(name, seconds, reward_func, **columns)
        if inspect.isawaitable(scores):
            # A notebook's event loop is already running, so another thread runs a loop of its own.
            with ThreadPoolExecutor(1) as pool:
                scores = pool.submit(asyncio.run, scores).result()
    if not hasattr(scores, "__iter__"):
        raise ValueError(f"reward {name} returned {scores!r}: return a list with a score for each")
    return list(scores)


@contextmanager
def kept(seed: str = "") -> Iterator[None]:
    """Restore random states, torch's grad mode, and the working directory after the block.

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
            stack.callback(torch.set_grad_enabled, torch.is_grad_enabled())
            torch.default_generator.manual_seed(random.getrandbits(63))
        yield


@contextmanager
def contained(name: str) -> Iterator[None]:
    """Turn `sys.exit()`, which would look like success, into an error that names the reward.

    Raises:
        RuntimeError: The reward called `sys.exit()`.
    """
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(
            f"reward {name} called sys.exit({error.code!r}): return a score or None for what it "
            "cannot score, or raise an error that says why"
        ) from error


def limited(name: str, seconds: float, func: Callable[..., Any], /, **columns: Any) -> Any:
    """Return the result of a reward that is stopped after `seconds`, even in a regular expression.

    A loop in other C code, such as numpy's, is not stopped. Outside the main thread, or if someone
    else has set an alarm, there is no limit. A reward that catches the interruption is interrupted
    again.

    Raises:
        TookTooLong: The call took longer than `seconds`.
    """
    is_main = threading.current_thread() is threading.main_thread()
    free = is_main and hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) in FREE
    if not (free and seconds):
        return func(**columns)
    is_over = False

    def interrupt(*_: Any) -> None:
        if not is_over:
            raise _Overdue

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
            return func(**columns)
        finally:
            is_over = True
    except _Overdue:
        raise TookTooLong(
            f"reward {name} took more than {seconds:g} seconds and was stopped: look for a loop "
            "that never ends"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
