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
GIB = 2**30


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
    target = run / "notebooks" / source.name
    (run / "progress.json").unlink(missing_ok=True)
    set_environment(run)
    before = _Before(run, stage)
    why = _execute(source, target, parameters)
    entry = run.manifest().get(stage, {})
    if not why and (entry.get("status") != "done" or entry == before.entry):
        why = "ended before its last cell, which says that the stage is done: by exit()?"
    if not why:
        return target
    kept = f"The notebook up to there: {target}"
    try:
        if before.restore():
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


class _Before:
    """What a run says of a stage that is to be executed again, in case it fails at once."""

    def __init__(self, run: Run, stage: str) -> None:
        self.run, self.manifest = run, run.manifest()
        self.entry, path = self.manifest.get(stage, {}), run / "config.yaml"
        self.config = path.read_bytes() if path.exists() else b""

    def restore(self) -> bool:
        """Say the same again, if the stage was done and has overwritten nothing; whether so."""
        written = self.entry.get("outputs", {}) if self.entry.get("status") == "done" else {}
        files = {self.run / name: digest for name, digest in written.items()}
        if not files or not all(p.exists() and sha256(p) == digest for p, digest in files.items()):
            return False
        with atomic_path(self.run / "config.yaml") as temporary:
            temporary.write_bytes(self.config)
        write_json(self.run / "manifest.json", self.manifest)
        return True


def _execute(source: Path, target: Path, parameters: Mapping[str, Any]) -> str:
    """Why the notebook did not reach its end; "" if it did."""
    # Without it jsonschema leaves the format of addresses unchecked, which no notebook has; with
    # it papermill's import takes 2 s more, for its grammar.
    sys.modules.setdefault("rfc3987_syntax", None)
    import papermill
    from papermill.exceptions import PapermillExecutionError

    kernels: list[Any] = []
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
            kernel_manager_class=_kernel_manager(kernels),
        )
    except PapermillExecutionError as error:
        return f"failed in cell {error.exec_count}: {error.ename}: {error.evalue}"
    except OSError as error:
        return f"was stopped: {disk_error(target, error)}"
    except RuntimeError as error:
        if not kernels or kernels[0].code is None:
            return f"failed: {error}"
        return f"failed: {kernels[0].last_words()}"
    return ""


def _kernel_manager(kernels: list[Any]) -> type:
    """jupyter_client's, which adds itself to `kernels` and remembers how its process ended."""
    from jupyter_client import AsyncKernelManager

    class Kernel(AsyncKernelManager):
        code: int | None = None
        memory = ""

        async def start_kernel(self, **options: Any) -> None:
            await super().start_kernel(**options)
            self.memory = _memory(self.provisioner.pid)
            kernels.append(self)

        async def is_alive(self) -> bool:  # is asked each second
            process = getattr(self.provisioner, "process", None)
            self.code = process.poll() if process else self.code
            if process and self.code is None:
                self.memory = _memory(process.pid)
            return await super().is_alive()

        def last_words(self) -> str:
            return f"its process {_ending(self.code)}. Shortly before, {self.memory}. {NEXT}"

    return Kernel


NEXT = (
    "What was written before is kept: the same command with --from this stage goes on, a "
    "training from its last checkpoint. Where memory was short, see "
    "docs/troubleshooting.md#out-of-memory"
)


def _memory(pid: int) -> str:
    """What a process holds of the machine's memory, where that can still be seen."""
    free, total = psutil.virtual_memory().available / GIB, psutil.virtual_memory().total / GIB
    try:
        held = psutil.Process(pid).memory_info().rss / GIB
    except psutil.NoSuchProcess:
        held = 0
    own = f"it held {held:.1f} GiB, and " if held else ""
    return f"{own}{free:.1f} of {total:.1f} GiB were free"


def _ending(code: int | None) -> str:
    """How a process ended, by its exit code, a negative one for a signal."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        likely = " (by the system when memory runs out, or by a person)"
        return f"was killed by {name}{likely if name == 'SIGKILL' else ''}"
    return f"ended by itself with exit code {code}"
