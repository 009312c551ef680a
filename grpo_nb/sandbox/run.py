"""Run a program in the sandbox that works here, against its tests or for its output."""

from typing import Any

from grpo_nb.sandbox.bubblewrap import bubblewrap_problem, in_bubblewrap
from grpo_nb.sandbox.monty import in_monty
from grpo_nb.sandbox.program_tests import parse_tests
from grpo_nb.sandbox.values import DEFAULT_LIMITS, Limits, Outcome, Verdict, reason_of, show


def run_tests(
    code: str, tests: Any, *, limits: Limits = DEFAULT_LIMITS, backend: str = "auto"
) -> Verdict:
    """Run one program against its tests and return the verdict.

    Args:
        code: The program.
        tests: Its tests, in one of the three shapes that `grpo_nb.sandbox` describes.
        limits: What the program may use.
        backend: "bubblewrap", "monty", or "auto" for the first of them that works here.

    Raises:
        ValueError: Tests have an unknown shape, or an assert cannot be judged from outside.
        RuntimeError: The backend does not work here; the message names what to install.
    """
    parsed = parse_tests(tests)
    outcome = _run(code, [test.ask for test in parsed], limits, backend)
    ending = outcome.failure or outcome.ending or "gave no answer"
    answers = outcome.answers + [("failed", ending)] * (len(parsed) - len(outcome.answers))
    reasons = tuple(map(reason_of, parsed, answers))
    return Verdict(reasons.count(""), len(parsed), reasons, outcome.failure)


def run_program(
    code: str, stdin: str = "", *, limits: Limits = DEFAULT_LIMITS, backend: str = "auto"
) -> tuple[bool, str]:
    """Run one program and return what it prints.

    Args:
        code: The program.
        stdin: Its standard input.
        limits: What the program may use.
        backend: The backend, as for `run_tests`.

    Returns:
        Whether the program succeeded, and what it printed or why it failed.

    Raises:
        RuntimeError: No backend works here, or the one that ran could not handle this program.
    """
    outcome = _run(code, [stdin], limits, backend)
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    [(kind, output)] = outcome.answers or [("failed", outcome.ending)]
    text = output if isinstance(output, str) else show(output)  # any value may be forged
    return kind == "value", text.encode(errors="replace").decode()


def _run(code: str, asks: list[Any], limits: Limits, backend: str) -> Outcome:
    run = {"bubblewrap": in_bubblewrap, "monty": in_monty}[choose_backend(backend)]
    if not isinstance(asks[0], str):
        return run(code, asks, limits)
    answers: list[tuple[str, Any]] = []
    for stdin in asks:  # each in a sandbox of its own
        outcome = run(code, stdin, limits)
        answers += outcome.answers
        if not outcome.answers:
            return outcome._replace(answers=answers)
    return Outcome(answers)


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
