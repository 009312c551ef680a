"""Save what is trained when a signal or an error ends a training, and find it again."""

import json
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import SafetensorError, safe_open

from grpo_nb import ranks
from grpo_nb.files import atomic_path, read_json, read_lines
from grpo_nb.training import stock

STATE = "trainer_state.json"
SAVED_BY_TORCH = (".pt", ".pth", ".bin")  # zip files


@contextmanager
def signals(then: Callable[[], Any]) -> Iterator[list[int]]:
    """Call `then` on each SIGINT or SIGTERM inside the block; yield a list of these signals."""
    received: list[int] = []

    def handle(number: int, _: Any) -> None:
        received.append(number)
        then()

    if threading.current_thread() is not threading.main_thread():
        yield received  # only the main thread can handle signals
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stop_on_signals(event: threading.Event) -> Iterator[list[int]]:
    """Stop after the current step on SIGINT (interrupt button) or SIGTERM, at once on a second one.

    Yields:
        A list of the signals received so far.
    """

    def stop() -> None:
        if len(signals_so_far) > 1:
            raise KeyboardInterrupt
        print("stopping after this step, with a checkpoint; interrupt again to stop at once")
        event.set()

    with signals(stop) as signals_so_far:
        yield signals_so_far


def keep_last_step(trainer: Any, error: Exception, saved: str | None) -> None:
    """Save the last complete step after an error; if saving fails, add a note to the error.

    If several processes train, none of them saves: the others may have reached another part of the
    step, or have ended. Nor is a step saved in the middle of a generation, because a checkpoint
    holds no completions.

    Args:
        trainer: The trainer whose `train` raised.
        error: The error.
        saved: The newest checkpoint of this training; None if there is none.
    """
    step = trainer.state.global_step
    used_up = stock.generation_is_used_up(trainer.args, step)
    if ranks.count() > 1 or step == step_of(saved) or not used_up:
        return
    try:
        trainer._save_checkpoint(trainer.model, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    except Exception as second:  # such as a full disk; the first error is raised
        error.add_note(f"step {step} could not be kept: {second}")


def step_of(checkpoint: str | None) -> int:
    """Return the step of a checkpoint; 0 for None."""
    return int(checkpoint.rpartition("-")[2]) if checkpoint else 0


def steps_of(output_dir: str | Path) -> list[int]:
    """Return the steps of a trainer's checkpoints, oldest first; other folders do not count."""
    names = [path.name.partition("-")[2] for path in Path(output_dir).glob("checkpoint-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def times_of(output_dir: str | Path) -> dict[int, int]:
    """Return {step: when the checkpoint was written [ns]} of a trainer's checkpoints."""
    states = {s: Path(output_dir, f"checkpoint-{s}/{STATE}") for s in steps_of(output_dir)}
    return {step: file.stat().st_mtime_ns for step, file in states.items() if file.is_file()}


def newest_checkpoint(
    output_dir: str | Path, but: Mapping[int, int] = MappingProxyType({})
) -> str | None:
    """Return the newest complete checkpoint of a trainer; None if there is none.

        trainer.train(resume_from_checkpoint=newest_checkpoint("outputs"))

    transformers would take the checkpoint of the latest step, even if a killed process left it half
    written, or a full disk truncated its files.

    Args:
        output_dir: The trainer's `output_dir`.
        but: Checkpoints to leave out, as `times_of` returned them before a training.
    """
    times = times_of(output_dir)
    steps = [step for step in sorted(times, reverse=True) if but.get(step) != times[step]]
    paths = (Path(output_dir, f"checkpoint-{step}") for step in steps)
    return next((str(path) for path in paths if is_whole(path)), None)


def is_whole(checkpoint: Path) -> bool:
    """Return whether a checkpoint is complete: all its files can be opened and read.

    A checkpoint without trainer_state.json is not complete, because this file is written last.
    """
    try:
        state = read_json(checkpoint / STATE)
        for file in checkpoint.rglob("*"):
            if file.suffix == ".safetensors":
                with safe_open(file, "np"):  # which compares the size with the header
                    pass
            elif file.suffix in SAVED_BY_TORCH and zipfile.ZipFile(file).testzip():
                return False
    except (OSError, ValueError, SafetensorError, zipfile.BadZipFile):
        return False
    return state.get("global_step") == step_of(checkpoint.name)


def forget_after(folder: Path, steps: int) -> None:
    """Remove what training wrote after a checkpoint, because those steps are trained again.

    Args:
        folder: The run's train/, with metrics, alerts, completions and the best adapter.
        steps: The step of the checkpoint; 0 without a checkpoint.
    """
    for name in ("metrics.jsonl", "alerts.jsonl"):
        lines = [line for line in read_lines(folder / name) if steps and line["step"] <= steps]
        with atomic_path(folder / name) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = folder / "best"
    if (best / "eval.json").is_file() and read_json(best / "eval.json")["step"] > steps:
        shutil.rmtree(best)
    for path in (folder / "completions").glob("*.parquet"):
        if int(path.stem.rpartition("_")[2]) > steps:
            path.unlink()
