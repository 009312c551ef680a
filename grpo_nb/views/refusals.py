"""Show a refusal in a notebook as one red line with its fix, and a reward's error as one frame.

A traceback of this package's own frames says nothing to who wrote the cell. Errors in a cell's own
code, and those inside other libraries, are shown as always.
"""

import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

import grpo_nb

PACKAGE = str(Path(grpo_nb.__file__).parent)
LIBRARIES = (PACKAGE, str(Path(traceback.__file__).parent), "<frozen")
REFUSALS = (ValueError, FileNotFoundError, RuntimeError)
RED, PLAIN = "\x1b[31m", "\x1b[0m"


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
    lines = [f"{RED}{type(error).__name__}: {error}{PLAIN}", *notes]
    if frame := own_frame(error):
        return [lines[0], f"line {frame.lineno}: {frame.line}", *notes]
    if is_ours and isinstance(error, SyntaxError):  # of a cell that begins with %%rewards
        lines[0] = f"{RED}SyntaxError: {error.msg}{PLAIN}"
        return [lines[0], f"line {error.lineno}: {(error.text or '').strip()}", *notes]
    return [f"{RED}{error}{PLAIN}", *notes] if is_ours and isinstance(error, REFUSALS) else None


def shorten(error: BaseException) -> BaseException:
    """Return the exception, which a notebook then shows in short, as if `register` was called."""
    error._render_traceback_ = lambda: in_short(error) or traceback.format_exception(error)
    return error


def register(shell: Any) -> None:
    """Show this package's refusals, and the errors of rewards, in short in this notebook."""
    shell.set_custom_exc((Exception,), _show)


def _show(
    shell: Any,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType,
    tb_offset: int | None = None,
) -> None:
    if lines := in_short(error):
        shell._showtraceback(kind, error, lines)
    else:
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
