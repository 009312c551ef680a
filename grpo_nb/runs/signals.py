"""SIGINT and SIGTERM, obeyed in order: by a training, a run of notebooks, a sweep."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def signals(then: Callable[[], Any]) -> Iterator[list[int]]:
    """The numbers of SIGINT and SIGTERM that came while this is entered; each calls `then`."""
    came: list[int] = []

    def handle(number: int, _: Any) -> None:
        came.append(number)
        then()

    if threading.current_thread() is not threading.main_thread():
        yield came  # signals belong to the main thread
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
