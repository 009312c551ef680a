"""Run a program in pydantic-monty, an interpreter of a subset of Python."""

import builtins
import functools
import marshal
import re
import sys
import sysconfig
import time
from typing import Any

from grpo_nb.sandbox.values import Limits, Opaque, Outcome, plain

# monty needs these in every worker's thread, and the first computation is not thread-safe.
sysconfig.get_config_vars()


def in_monty(code: str, asks: list[Any], limits: Limits) -> Outcome:
    """Run a program in pydantic-monty, and return its answers; `run_tests` judges them.

    Args:
        code: The program.
        asks: What each test asks, (expression, arguments or None).
        limits: What the program may use.
    """
    import pydantic_monty

    answers: list[tuple[str, Any]] = []
    bounds = {"max_feed_duration_secs": limits.seconds, "max_total_sleep_secs": limits.seconds}
    bounds |= {"max_memory": limits.memory_mib << 20, "max_suspensions": 1_000_000}
    feed = functools.partial(_feed, limits=limits, until=time.monotonic() + limits.seconds)
    try:
        # Each program has its own worker, which is killed a second after the program's limit.
        workers = pydantic_monty.Monty(max_processes=1, request_timeout=limits.seconds + 1)
        with workers as pool, pool.checkout(limits=bounds) as session:
            loaded = feed(session, code)
            for expression, arguments in asks if loaded[0] == "value" else []:
                call = f"({expression})" + ("" if arguments is None else "(*arguments_)")
                answers.append(feed(session, call, {"arguments_": arguments}))
    except TimeoutError as error:
        return Outcome(answers, ending=str(error))
    except NotImplementedError as error:
        return Outcome([], failure=f"monty cannot run this program: {error}")
    except (OSError, pydantic_monty.MontyError) as error:
        return Outcome([], failure=f"monty did not start: {error}")
    return Outcome(answers, ending="" if answers else loaded[1])


def _print(_: str, text: str) -> None:
    """Discard what a program prints."""


def _input(prompt: str = "") -> str:
    raise EOFError("EOF when reading a line")


def _feed(
    session: Any, code: str, inputs: dict[str, Any] | None = None, *, limits: Limits, until: float
) -> tuple[str, Any]:
    """Run code in a session; return ("value", its value) or ("failed", the reason).

    Raises:
        TimeoutError: The program timed out or crashed monty; the message says which.
        NotImplementedError: The program needs a feature that monty lacks.
    """
    import pydantic_monty as monty

    timed_out = f"timed out after {limits.seconds:g} s"
    if time.monotonic() > until:
        raise TimeoutError(timed_out)
    host = {"print_callback": _print, "external_lookup": {"input": _input}}
    try:
        value = session.feed_run(code, inputs=inputs, **host)
    except monty.MontyCrashedError as error:
        raise TimeoutError(timed_out if error.timed_out else "crashed the interpreter") from None
    except monty.MontyConversionError as error:
        raise NotImplementedError(str(error)) from None
    except (monty.MontyError, ValueError, ArithmeticError, RecursionError) as error:
        cause = error.exception() if isinstance(error, monty.MontyError) else error
        if isinstance(cause, TimeoutError):
            raise TimeoutError(timed_out) from None
        if isinstance(cause, MemoryError):
            return "failed", "out of memory"
        if _lacks(cause):
            raise NotImplementedError(str(cause)) from None
        return "failed", f"raised {type(cause).__name__}: {cause}"
    return _take(value, limits)


def _take(value: Any, limits: Limits) -> tuple[str, Any]:
    """Return a result of monty as an answer: plain data of limited size, or an opaque value."""
    try:
        size_bytes = len(marshal.dumps(plain(value)))
    except TypeError:
        return "value", Opaque(type(value).__name__)
    except (ValueError, RecursionError):
        return "failed", "returned a value nested too deeply"
    if size_bytes > limits.output_bytes:
        return "failed", f"returned more than {limits.output_bytes} bytes"
    return "value", value


def _lacks(error: BaseException) -> bool:
    """Return whether an error is due to a feature that monty lacks, and not to the program."""
    module = re.search(r"^(?:No module named|module) '(\w+)", str(error))
    name = re.search(r"^name '(\w+)' is not defined", str(error))
    return (
        (isinstance(error, NotImplementedError) and "support" in str(error))
        or (module is not None and module[1] in sys.stdlib_module_names)
        or (name is not None and hasattr(builtins, name[1]))
    )
