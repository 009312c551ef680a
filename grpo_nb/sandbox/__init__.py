"""Run generated Python against tests in a sandbox, where it can do no harm and cannot cheat.

Each program has its own sandbox: bubblewrap with resource limits, or else pydantic-monty,
which interprets a subset of Python (for example in default Docker, where bubblewrap fails).
The program never judges itself: inputs go in, plain values come out, and this process
compares them. No expected value enters the sandbox, so no program can know or forge one.
`run_tests` returns a `Verdict`.

Tests come in two shapes, as Python objects or as JSON text:
    {"function": "f", "cases": [[[2], 4], [[3], 9]]}    [[arguments, result], ...]
    ["assert f(2) == 4", "assert not f(0)"]             see `parse_assert`

Type and value must be equal: True is not 1, [1] is not (1,), and an instance of a subclass
of int is not an int. There are three exceptions: an expected float accepts an equal int, NaN
equals NaN, and a subclass of dict counts as a dict. In bubblewrap, programs can import the
standard library.
"""

from typing import Any

from grpo_nb.sandbox.bubblewrap import bubblewrap_problem, in_bubblewrap
from grpo_nb.sandbox.monty import in_monty
from grpo_nb.sandbox.program_tests import parse_tests
from grpo_nb.sandbox.values import DEFAULT_LIMITS, Limits, Verdict, reason_of


def run_tests(
    code: str, tests: Any, *, limits: Limits = DEFAULT_LIMITS, backend: str = "auto"
) -> Verdict:
    """Run one program against its tests and return the verdict.

    Args:
        code: The program.
        tests: Its tests, in one of the two shapes that `grpo_nb.sandbox` describes.
        limits: What the program may use.
        backend: "bubblewrap", "monty", or "auto" for the first of them that works here.

    Raises:
        ValueError: Tests have an unknown shape, or an assert cannot be judged from outside.
        RuntimeError: The backend does not work here; the message names what to install.
    """
    parsed = parse_tests(tests)
    run = {"bubblewrap": in_bubblewrap, "monty": in_monty}[choose_backend(backend)]
    outcome = run(code, [test.ask for test in parsed], limits)
    ending = outcome.failure or outcome.ending or "gave no answer"
    answers = outcome.answers + [("failed", ending)] * (len(parsed) - len(outcome.answers))
    reasons = tuple(map(reason_of, parsed, answers))
    return Verdict(reasons.count(""), len(parsed), reasons, outcome.failure)


def choose_backend(backend: str = "auto") -> str:
    """Return the backend that will run: "bubblewrap" or "monty", never one that isolates less."""
    if backend not in ("auto", "bubblewrap", "monty"):
        raise ValueError(f"backend {backend!r}: use 'auto', 'bubblewrap' or 'monty'")
    if backend != "monty" and not (problem := bubblewrap_problem()):
        return "bubblewrap"
    if backend == "bubblewrap":
        advice = "`apt-get install bubblewrap` (0.8 or later), allow user namespaces"
        raise RuntimeError(f"bubblewrap does not work here ({problem}): {advice}")
    try:
        import pydantic_monty  # noqa: F401
    except ImportError:
        advice = "`apt-get install bubblewrap` or `pip install pydantic-monty`"
        other = f"; bubblewrap: {problem}" if backend == "auto" else ""
        raise RuntimeError(f"no sandbox for generated code: {advice}{other}") from None
    return "monty"
