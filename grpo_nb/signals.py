"""Handle SIGINT and SIGTERM in an orderly way in training, notebook runs and sweeps."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals(then: Callable[[], Any]) -> Iterator[list[int]]:
    """Call `then` on each SIGINT or SIGTERM inside the block; yield a list of their numbers."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        then()

    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can handle signals
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
