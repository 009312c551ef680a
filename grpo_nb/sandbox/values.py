"""Define limits, tests and verdict of a program, and which Python values are plain or equal."""

from collections.abc import Callable
from typing import Any, NamedTuple

START_SECONDS = 20.0  # how long a sandbox may take to start, even on a busy machine
FILE_BYTES = 1 << 20  # largest file a program may write; its /tmp holds 16 of them


class Limits(NamedTuple):
    """Limit what one program may use.

    Attributes:
        seconds: Wall-clock time of all its tests together, from the start of its code.
        memory_mib: Address space of each of its processes, not of all together.
        output_bytes: How much the program may return in one test. What it prints is discarded.
        processes: Processes and threads at one time; monty always has one.
    """

    seconds: float = 2.0
    memory_mib: int = 512
    output_bytes: int = 64 * 1024
    processes: int = 16


DEFAULT_LIMITS = Limits()


class Verdict(NamedTuple):
    """Describe the results of a program in its tests.

    Attributes:
        reasons: One per test, such as "wrong value: got 5, expected 4"; "" if it passed.
        failure: Why the sandbox itself failed; "" if it did not. The program is not to blame for
            such a failure, so a reward gives None.
    """

    passed: int
    total: int
    reasons: tuple[str, ...]
    failure: str = ""

    @property
    def share(self) -> float:
        """Return the share of the tests that passed."""
        return self.passed / self.total


class ProgramTest(NamedTuple):
    ask: Any  # what enters the sandbox: (expression, arguments or None)
    holds: Callable[[Any], bool]
    expected: str


class Outcome(NamedTuple):
    """Hold what a program answered in a sandbox, before it is judged.

    answers: Test by test, ("value", plain value) or ("failed", reason).
    ending: Why some tests have no answer.
    failure: Why the program did not run at all.
    """

    answers: list[tuple[str, Any]]
    ending: str = ""
    failure: str = ""


class Opaque(NamedTuple):
    """Represent a value that is not plain data; no test can expect it."""

    kind: str

    def __repr__(self) -> str:
        return f"<{self.kind} object>"


def plain(value: Any) -> Any:
    """Return the value, or raise TypeError if it contains anything but plain Python data."""
    if isinstance(value, dict):
        plain([*value, *value.values()])
    elif type(value) in (list, tuple, set, frozenset):
        for item in value:
            plain(item)
    elif type(value) not in (type(None), bool, int, float, str):
        raise TypeError(f"{show(value)} is a {type(value).__name__}, not plain Python data")
    return value


def same(expected: Any, got: Any) -> bool:
    """Return whether types and values are equal, at every level.

    An expected float also accepts an equal int, and NaN equals NaN.
    """
    if type(expected) is float and type(got) in (int, float):
        return got == expected or (got != got and expected != expected)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list | tuple):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        left, right = ({exact(k): v for k, v in d.items()} for d in (expected, got))
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return exact(expected) == exact(got)


def exact(value: Any) -> Any:
    """Return a hashable key that differs where types differ: {1} and {True} get different keys."""
    if type(value) is tuple:
        return tuple, tuple(map(exact, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(exact, value))
    return type(value), value


def decode(item: Any) -> Any:
    """Decode a value that the harness's `encode` wrote; a forged value may raise any error."""
    if isinstance(item, list):
        return [decode(part) for part in item]
    if not isinstance(item, dict):
        return item
    ((tag, body),) = item.items()
    if tag == "other":
        return Opaque(body)
    return {"tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict}[tag](decode(body))


def reason_of(test: ProgramTest, answer: tuple[str, Any]) -> str:
    """Return why the answer fails the test, or "" if it passes."""
    kind, got = answer
    if kind == "failed":  # the text may be forged, and an empty one would be a pass
        text = " ".join(got.split())[:300] or "failed"
        return "".join(letter if letter.isprintable() else "?" for letter in text)
    try:
        passes = type(got) is not Opaque and test.holds(got)
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):  # `None < 3`
        passes = False
    return "" if passes else f"wrong value: got {show(got)}, expected {test.expected}"


def show(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more than 4,300 digits, or nested without end
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 120 else text[:117] + "..."
