r"""Let math-verify compare two expressions, in a worker that can be killed.

math-verify limits its own time with SIGALRM, which works in the main thread only and replaces the
caller's alarm. Here math-verify runs in another process, with limits on time and memory.
The worker is this file, run as a script. It imports math-verify once, and forks a child for each
comparison, which takes 10 ms. The kernel kills a child whose time is up. The worker ends when its
socket closes, at the latest when the process that started it ends.
https://github.com/huggingface/Math-Verify
"""

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from threading import Lock
from typing import Any

LEAST_SECONDS, REFERENCE_SECONDS = 0.06, 1.0  # CPU time; a comparison takes 0.002 to 0.05
MEMORY, REMEMBERED = 2 << 30, 20_000  # bytes of address space; verdicts
HOW = {"allow_set_relation_comp": True, "timeout_seconds": None}  # x > 2 may equal (2, oo)
READY = b"!"  # the first byte that a worker sends
WARM_UP = r"""\frac{1}{\sqrt{3}-1} \frac{\sqrt{3}+1}{2}  x^2-1 (x-1)(x+1)  [1,2] (1,2)
    x>1 (2,\infty)  x+1 \frac{x^2-1}{x-1}  \{1,\pi\} \{\pi,1.5\}  \sin{2x} 2\sin{x}\cos{x}
    (1,2)\cup[3,\infty) [3,5]  2x+3y=6 y=2-\frac{2}{3}x  e^{x^2} \log_2{8}
    \frac{n!}{(n-2)!} n(n-1)  3+2i e^{i\pi}"""  # pairs


def equal_latex(reference: str, answer: str, timeout_seconds: float = 0.5) -> bool | None:
    r"""Return whether math-verify finds two expressions equal.

    The function is thread-safe. It blocks the caller, even in a running event loop.

    Args:
        reference: The LaTeX of the reference answer.
        answer: The LaTeX to compare with it; "" only tests whether the reference can be parsed.
        timeout_seconds: CPU time for a comparison, in seconds. Each time-out multiplies the limit
            of later comparisons by 0.6; each comparison that finishes raises the limit again, at
            most to this value. This bounds the time of a batch.

    Returns:
        True if the expressions are equal; False if not, or if the answer cannot be parsed or takes
        too long; None if the reference cannot be parsed, or if the worker failed twice.

    Raises:
        RuntimeError: The worker does not start, for example because math-verify is missing.

    >>> equal_latex(r"\frac{1}{\sqrt{2}}", r"\frac{\sqrt{2}}{2}"), equal_latex("x", "y")
    (True, False)
    """
    return _WORKER.verify(reference, answer, timeout_seconds)


class MathWorker:
    """Compare expressions in a process that the first call starts, for one caller at a time.

    Verdicts are cached, since answers repeat within a group.
    """

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock = Lock()
        self.verdicts: dict[tuple[str, str], bool | None] = {}
        self.timeouts = 0.0  # number of recent time-outs, at most 6

    def verify(self, reference: str, answer: str, seconds: float) -> bool | None:
        """Return the verdict of `equal_latex`."""
        with self.lock:
            if (reference, answer) in self.verdicts:
                return self.verdicts[reference, answer]
            limit = max(min(seconds, LEAST_SECONDS), seconds * 0.6**self.timeouts)
            for _ in range(2):
                with suppress(OSError):  # the process was killed
                    reply = self.ask(reference, answer, limit)
                    break
            else:
                return None
            if reply == b"T":  # not remembered: with more time the answer may be right
                self.timeouts = min(self.timeouts + 1, 6)
                return False
            self.timeouts = max(self.timeouts - 0.1, 0)
            self.verdicts = self.verdicts if len(self.verdicts) < REMEMBERED else {}
            verdict = self.verdicts[reference, answer] = {b"1": True, b"0": False}.get(reply)
            return verdict

    def ask(self, reference: str, answer: str, cpu_seconds: float) -> bytes:
        """Return b"1" (equal), b"0" (unequal), b"?" (bad reference) or b"T" (time is up).

        Raises:
            OSError: The process was killed.
        """
        try:
            if self.process is None:
                self._start()
            self.socket.settimeout(5 + 10 * cpu_seconds)  # for a process that hangs
            self.socket.sendall(json.dumps([reference, answer, cpu_seconds]).encode() + b"\n")
            if not (reply := self.socket.recv(1)):
                raise ConnectionError("the math-verify worker was killed")
            return reply
        except BaseException:  # also an interrupt: else the next caller would get this reply
            self.close()
            raise

    def _start(self) -> None:
        keep = {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME"} & set(os.environ)  # no secrets
        environment = {name: os.environ[name] for name in keep} | {"PYTHONHASHSEED": "0"}
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        options["start_new_session"] = True  # so that Jupyter's interrupt does not reach it
        self.socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-P", __file__]
            self.process = subprocess.Popen(command, stdin=theirs, env=environment, **options)
        self.socket.settimeout(120)  # seconds, to import math-verify on a busy machine
        if self.socket.recv(1) != READY:
            check = f"{sys.executable} -c 'import math_verify'"
            raise RuntimeError(f"the math-verify worker did not start: run `{check}` to see why")

    def close(self, kill: bool = True) -> None:
        """End the process and its children; if `kill` is false, only forget them."""
        if self.process is not None:
            self.socket.close()
            if kill and self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.process.returncode, self.process = 0, None

    def forget(self) -> None:
        """Forget the process after a fork: it belongs to the parent, which may end first."""
        self.close(kill=False)
        self.__init__()


_WORKER = MathWorker()
os.register_at_fork(after_in_child=_WORKER.forget)


def _parse(text: str) -> list[Any]:
    """Return the expressions that math-verify finds in the text; [] if there are none."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    # math-verify's own handling of boxes and units would drop the text around them.
    rules = NormalizationConfig(malformed_operators=True, nits=True, boxed="none", units=False)
    config = LatexExtractionConfig(boxed_match_priority=-1, normalization_config=rules)
    return parse(f"${text}$", [config], "no_fallback", "first_match", parsing_timeout=None)


def _same_roots(reference: Any, answer: Any) -> bool:
    """Return False if equations in at most one unknown have different complex roots, else True."""
    from sympy import Eq, Symbol, solve

    unknown = getattr(reference, "free_symbols", set())
    if not (isinstance(reference, Eq) and isinstance(answer, Eq)) or len(unknown) > 1:
        return True
    if not unknown:
        return reference.rhs.equals(answer.rhs)
    z = Symbol("z")  # complex
    roots = [set(solve(one.subs(dict.fromkeys(unknown, z)), z)) for one in (reference, answer)]
    return roots[0] == roots[1]


def _compare(reference: str, answer: str, seconds: float) -> bytes:
    """Return the reply of `ask`, unless the signal of a timer ends this process.

    The signal shows whether the reference or the answer took too long.
    """
    from math_verify import verify

    reply = b"?"
    signal.setitimer(signal.ITIMER_VIRTUAL, REFERENCE_SECONDS)
    with suppress(Exception):  # raised by sympy; the reply shows which text is at fault
        if expected := _parse(reference):
            reply = b"0"
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, seconds)
            value = _parse(answer) if answer else []
            if verify(expected, value, **HOW) and _same_roots(expected[0], value[0]):
                reply = b"1"
    return reply


def _work() -> None:
    """Import math-verify, warm it up, then fork a child to answer each request."""
    import resource

    from math_verify import verify

    logging.disable(logging.CRITICAL)
    pairs = [_parse(text) for text in WARM_UP.split()]  # fills sympy's caches
    for reference, answer in zip(pairs[::2], pairs[1::2], strict=True):
        verify(reference, answer, **HOW)
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.write(0, READY)
    for line in sys.stdin.buffer:
        if not (child := os.fork()):
            os.write(0, _compare(*json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            os.write(0, b"?" if os.WTERMSIG(status) == signal.SIGVTALRM else b"T")


if __name__ == "__main__":
    _work()
