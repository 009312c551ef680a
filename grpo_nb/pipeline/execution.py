"""One notebook, executed by papermill in a kernel of its own, and why that failed."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from jupyter_client import AsyncKernelManager

from grpo_nb.runs import NOTEBOOKS, PROJECT_ROOT, Run
from grpo_nb.runs.files import atomic_path, disk_error, sha256, write_json

QUIET = {
    "TQDM_DISABLE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
# Otherwise each kernel says that it talks to us over a local TCP port, and at its end that it
# was interrupted.
KERNEL_ARGUMENTS = ["--IPKernelApp.log_level=50"]


class StageFailed(RuntimeError):
    """A notebook did not reach its end; the message says where, and why."""


class Stopped(StageFailed):
    """By a signal, after the notebook put its work in order; `signal` is its number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.signal = number


def stoppable(execute: Callable[[], Any]) -> None:
    """Run a notebook so that SIGTERM and SIGINT interrupt its kernel, as the button does."""
    came: list[int] = []

    def forward(number: int, frame: Any) -> None:
        came.append(number)
        for child in psutil.Process().children():
            child.send_signal(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():
        execute()  # signals belong to the main thread
        return
    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        # nbclient would end the kernel at once; in another thread it cannot catch signals.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(execute).result()
    except StageFailed as error:
        if not came:
            raise
        raise Stopped(str(error), came[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute_notebook(run: Run, stage: str, parameters: Mapping[str, Any]) -> Path:
    """Run one notebook in a kernel of its own; returns the executed copy in the run.

    Raises:
        StageFailed: A cell raised, the kernel died, the disk took no more, or the notebook ended
            without saying that its stage is done.
    """
    source = PROJECT_ROOT / "notebooks" / f"{NOTEBOOKS[stage]}.ipynb"
    target, config = run / "notebooks" / source.name, run / "config.yaml"
    (run / "progress.json").unlink(missing_ok=True)
    set_environment(run)
    before, config_before = run.manifest(), config.read_bytes() if config.exists() else b""
    why = _execute(source, target, parameters)
    entry = run.manifest().get(stage, {})
    if not why and (entry.get("status") != "done" or entry == before.get(stage)):
        why = "ended before its last cell, which says that the stage is done: by exit()?"
    if not why:
        return target
    kept = f"The notebook up to there: {target}"
    try:
        if _is_as_written(run, before.get(stage, {})):
            with atomic_path(config) as temporary:
                temporary.write_bytes(config_before)
            write_json(run / "manifest.json", before)
            kept += "\nWhat this stage had written before is as it was, and stays its result."
        else:
            run.record(stage, {"status": "failed", "error": why})
    except OSError as error:
        kept = f"The manifest could not say so: {error}"
    raise StageFailed(f"{NOTEBOOKS[stage]} {why}\n{kept}")


def set_environment(run: Run) -> None:
    """What a kernel inherits: where the package and the runs are, and no progress bars."""
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
    os.environ.update(QUIET | {"PYTHONPATH": path, "GRPO_NB_RUNS": str(run.path.parent)})


def _is_as_written(run: Run, entry: Mapping[str, Any]) -> bool:
    """Whether the stage of this entry was done, and all that it wrote is still there."""
    written = entry.get("outputs", {}) if entry.get("status") == "done" else {}
    files = {run / name: digest for name, digest in written.items()}
    return bool(files) and all(p.exists() and sha256(p) == digest for p, digest in files.items())


class Kernel(AsyncKernelManager):
    """jupyter_client's, which remembers how the last process that it started has ended."""

    code: int | None = None

    async def is_alive(self) -> bool:  # is asked each second
        if process := getattr(self.provisioner, "process", None):
            Kernel.code = process.poll()
        return await super().is_alive()


def _execute(source: Path, target: Path, parameters: Mapping[str, Any]) -> str:
    """Why the notebook did not reach its end; "" if it did."""
    # Without it jsonschema leaves the format of addresses unchecked, which no notebook has; with
    # it papermill's import takes 2 s more, for its grammar.
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill
    from papermill.exceptions import PapermillExecutionError

    Kernel.code = None
    try:
        papermill.execute_notebook(
            source,
            target,
            parameters=dict(parameters),
            cwd=source.parent,
            kernel_name="python3",
            progress_bar=False,
            extra_arguments=KERNEL_ARGUMENTS,
            store_widget_state=False,
            kernel_manager_class=Kernel,
        )
    except PapermillExecutionError as error:
        return f"failed in cell {error.exec_count}: {error.ename}: {error.evalue}"
    except OSError as error:
        return f"was stopped: {disk_error(target, error)}"
    except RuntimeError as error:
        return f"failed: {error if Kernel.code is None else _ending(Kernel.code)}"
    return ""


def _ending(code: int) -> str:
    """How a kernel's process ended, by its exit code, a negative one for a signal."""
    ended = f"ended by itself with exit code {code}"
    if code < 0:
        name = signal.Signals(-code).name
        likely = " (by the system when memory runs out, or by a person)"
        ended = f"was killed by {name}{likely if name == 'SIGKILL' else ''}"
    return (
        f"its process {ended}. What was written before is kept: the same command with --from this "
        "stage goes on, a training from its last checkpoint. Where memory was short, see "
        "docs/troubleshooting.md#out-of-memory"
    )
