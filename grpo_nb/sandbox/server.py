"""Keep one process in bubblewrap for many requests, where what it imports takes a second."""

import atexit
import contextlib
import itertools
import json
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from grpo_nb.sandbox.bubblewrap import job_of, started
from grpo_nb.sandbox.values import START_SECONDS, Limits

LARGEST_BYTES = 1 << 17  # of a request
# `answer`, of the program, has a process of its own for each request, which SIGALRM ends even in
# the middle of a multiplication. What it returns has to be a number.
SERVE = r"""
import json, os, signal, socket

def serve(fd):
    link = socket.socket(fileno=fd)
    while request := link.recv(1 << 17):
        number, seconds, arguments = json.loads(request)
        prepare(*arguments)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            link.close()
            signal.alarm(seconds)
            try:
                os.write(writing, repr(float(answer(*arguments))).encode())
            finally:
                os._exit(0)
        os.close(writing)
        text = os.read(reading, 64)
        os.close(reading)
        os.waitpid(child, 0)
        link.send(json.dumps([number, float(text) if text else None]).encode())
"""


class Server:
    """Call the function `answer` of a program in the sandbox, after its function `prepare`.

    Args:
        code: The program.
        folders: Folders that it can read, beside the standard library.
        memory_mib: The address space of each of its processes.
    """

    def __init__(self, code: str, folders: Sequence[str], memory_mib: int = 1024) -> None:
        self._code, self._folders = f"{SERVE}\n{code}", folders
        self._limits = Limits(10**6, memory_mib)  # of the processor's time, over all requests
        self._lock, self._numbers = threading.Lock(), itertools.count()
        self._stack, self._process = contextlib.ExitStack(), 0

    def ask(self, *arguments: Any, seconds: int = 2) -> float | None:
        """Return the number that `answer` returns; None if there is none within these seconds.

        Raises:
            RuntimeError: The sandbox does not answer, not even after a second start.
        """
        number = next(self._numbers)
        request = json.dumps([number, seconds, arguments]).encode()
        if len(request) > LARGEST_BYTES:
            return None
        problem = ""
        with self._lock:
            for _ in range(2):
                try:
                    if self._process != os.getpid():  # also after a fork
                        self._start()
                    self._link.settimeout(START_SECONDS + seconds)
                    self._link.send(request)
                    while reply := self._link.recv(LARGEST_BYTES):
                        numbered, value = json.loads(reply)
                        if numbered == number:  # not that of a request that was interrupted
                            return value
                except OSError as error:
                    problem = str(error)
                self.close()
        raise RuntimeError(f"the sandbox does not answer: {problem or 'its program ended'}")

    def _start(self) -> None:
        self._stack.pop_all()  # those of the process that this one was forked from
        self._link, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _, job = job_of(self._code, [("serve", [end.fileno()])], self._limits)
        with end:
            self._stack.enter_context(started(job, self._folders, [end.fileno()]))
        self._stack.enter_context(self._link)
        self._process = os.getpid()
        atexit.register(self.close)

    def close(self) -> None:
        """End the program, if this process started it."""
        if self._process == os.getpid():
            self._process = 0
            self._stack.close()
