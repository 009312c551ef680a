"""Keep a user's reward from ending the calling process, and from blocking it."""

import ctypes
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

LIMIT = "seconds_per_completion"  # the attribute that holds the time limit of a user's reward
LOOK = 0.1  # seconds between two readings of the clock, and between two interruptions
FREE = (signal.SIG_DFL, signal.SIG_IGN, None)  # handlers of SIGALRM that may be replaced
stop: ContextVar[threading.Event] = ContextVar("stop", default=threading.Event())  # noqa: B039


class TookTooLong(RuntimeError):
    """Report that a reward was stopped at its time limit."""


class Stopped(BaseException):
    """Name the reward that `stop` ended; `except Exception` does not catch this."""


class _Overdue(BaseException):
    """Stop a reward from inside; the reward's own `except Exception` does not catch this."""


def limited(
    name: str, seconds: float, func: Callable[..., Any], /, *arguments: Any, **columns: Any
) -> Any:
    """Return the result of a reward, unless the call takes too long or `stop` is set meanwhile.

    A loop in Python code is stopped, and so is a regular expression in the main thread. Another
    loop in C code (numpy) is not, and neither is a reward that waits for another thread. With a
    limit of 0 seconds, the call is not interrupted, and `stop` takes effect after it.

    Raises:
        TookTooLong: The call took longer than `seconds`.
        Stopped: Another thread has set `stop`.
    """
    thread, over, lock = ctypes.c_ulong(threading.get_ident()), threading.Event(), threading.RLock()
    interrupt, request = ctypes.pythonapi.PyThreadState_SetAsyncExc, stop.get()
    deadline = time.monotonic() + seconds

    def watch() -> None:
        while not over.wait(min(LOOK, seconds)):
            with lock:
                due = request.is_set() or time.monotonic() >= deadline
                if due and not over.is_set():
                    interrupt(thread, ctypes.py_object(_Overdue))

    def end() -> None:
        with lock:
            over.set()
            interrupt(thread, None)  # cancels an interruption that has not arrived yet

    # No `with` around the call: the interruption may arrive at any time before `end` has finished.
    try:
        if seconds:
            threading.Thread(target=watch, daemon=True, name="limit of a reward").start()
        try:
            with _alarm(seconds):
                result = func(*arguments, **columns)
        finally:
            end()
        if request.is_set():  # the reward may have caught the interruption
            raise _Overdue
        return result
    except _Overdue:
        end()
        if request.is_set():
            raise Stopped(name) from None
        raise TookTooLong(
            f"reward {name} took more than {seconds:g} seconds and was stopped: look for a loop "
            "that never ends, or raise rewards.seconds"
        ) from None


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise _Overdue after `seconds`, even in a regular expression, which looks for signals.

    Only the main thread gets signals. An alarm that someone else has set is left alone, and one
    that the block sets cancels this one.
    """
    is_main = threading.current_thread() is threading.main_thread()
    free = is_main and hasattr(signal, "setitimer") and signal.getsignal(signal.SIGALRM) in FREE
    if not free or not 0 < seconds < math.inf:
        yield
        return
    before = signal.signal(signal.SIGALRM, _overdue)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _overdue(*_: Any) -> None:
    raise _Overdue


@contextmanager
def contained(name: str) -> Iterator[None]:
    """Turn `sys.exit()` into an error that names the reward; an exit would look like success.

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
