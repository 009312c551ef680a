"""Show a refusal in a notebook as one red line with its fix, and a reward's error as one frame.

A refusal is an exception that a `raise` of this package raises. Errors in a cell's own code, and
those inside other libraries, are shown as always.
"""

import linecache
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

PACKAGE = str(Path(__file__).parent)
LIBRARIES = (PACKAGE, str(Path(traceback.__file__).parent), "<frozen")
REFUSALS = (ValueError, FileNotFoundError, RuntimeError, KeyboardInterrupt)
RED, PLAIN = "\x1b[31m", "\x1b[0m"


def in_one_line() -> None:
    """Show refusals of this notebook in one line from now on; outside a notebook, do nothing."""
    shell = "IPython" in sys.modules and sys.modules["IPython"].get_ipython()
    if shell and not shell.custom_exceptions:
        shell.set_custom_exc((Exception, KeyboardInterrupt), _show)


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the last frame of the person's own code below this package's; None if there is none.

    That is where a reward raised. Frames of libraries and of Python's own modules are left out.
    """
    frames = traceback.extract_tb(error.__traceback__)
    ours = [number for number, frame in enumerate(frames) if frame.filename.startswith(PACKAGE)]
    below = frames[ours[0] :] if ours else []
    own = [f for f in below if not f.filename.startswith(LIBRARIES) and "-packages" not in f[0]]
    return own[-1] if own else None


def in_short(error: BaseException) -> list[str] | None:
    """Return the lines that say all of an error; None if its traceback is needed.

    >>> in_short(ValueError("raised by nobody")) is None
    True
    """
    frames, notes = traceback.extract_tb(error.__traceback__), getattr(error, "__notes__", [])
    is_ours = bool(frames) and frames[-1].filename.startswith(PACKAGE)
    if frame := own_frame(error):
        text = f"{RED}{type(error).__name__}: {error}{PLAIN}"
        return [text, f"line {frame.lineno}: {frame.line}", *notes]
    if is_ours and isinstance(error, SyntaxError):  # of a cell that begins with %%rewards
        text = f"{RED}SyntaxError: {error.msg}{PLAIN}"
        return [text, f"line {error.lineno}: {(error.text or '').strip()}", *notes]
    raises = is_ours and linecache.getline(frames[-1].filename, frames[-1].lineno).strip()
    if is_ours and isinstance(error, REFUSALS) and str(error) and raises.startswith("raise "):
        return [f"{RED}{error}{PLAIN}", *notes]
    return None


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    **options: Any,
) -> None:
    """Show an exception in short if that says all of it; `%tb` shows where it was raised."""
    if lines := in_short(error):
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, trace  # what %tb shows
        shell._showtraceback(kind, error, lines)
    else:
        shell.showtraceback((kind, error, trace), **options)
