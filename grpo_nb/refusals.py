"""Show this package's refusals in a notebook as one line, which names the value and the remedy.

A refusal is an exception that a `raise` of this package raises. Every other exception, such as one
of a person's reward, keeps its traceback.
"""

import linecache
import sys
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any

PACKAGE = Path(__file__).parent
KINDS = (ValueError, FileNotFoundError, RuntimeError, KeyboardInterrupt)
RED, PLAIN = "\x1b[31m", "\x1b[0m"


def in_one_line() -> None:
    """Show refusals of this notebook in one line from now on; outside a notebook, do nothing."""
    shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    if shell and not shell.custom_exceptions:
        shell.set_custom_exc(KINDS, show)


def show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    **options: Any,
) -> None:
    """Show an exception as IPython does, or in one line if it is a refusal; `%tb` shows the rest.

    Args:
        shell: The IPython shell.
        kind: The exception's class.
        error: The exception.
        trace: Its traceback.
        options: Of IPython.
    """
    if not is_refusal(error, trace):
        shell.showtraceback((kind, error, trace), **options)
        return
    sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # what %tb shows
    lines = [f"{RED}{kind.__name__}: {error}{PLAIN}", *getattr(error, "__notes__", ())]
    shell._showtraceback(kind, error, [*lines, "(%tb shows where)"])


def is_refusal(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether a `raise` in this package raised the exception, with a message."""
    *_, (frame, line) = walk_tb(trace)
    path = frame.f_code.co_filename
    is_ours = PACKAGE in Path(path).parents
    return is_ours and bool(str(error)) and linecache.getline(path, line).strip()[:6] == "raise "
