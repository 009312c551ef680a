"""Keep what is trained when a signal or an error ends a training, and find it again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_nb import ranks
from grpo_nb.files import read_json
from grpo_nb.signals import signals
from grpo_nb.training import stock
from grpo_nb.updates import Buttons

SAVES = "saves and stops after the step"


@contextmanager
def stop_on_signals(buttons: Buttons) -> Iterator[list[int]]:
    """Stop after the current step on SIGINT (interrupt button) or SIGTERM, at once on a second one.

    Yields:
        A list of the signals received so far.
    """

    def stop() -> None:
        if len(signals_so_far) > 1:
            raise KeyboardInterrupt
        print("stopping after this step, with a checkpoint; interrupt again to stop at once")
        buttons.stop.set()

    with signals(stop) as signals_so_far:
        yield signals_so_far


def keep_last_step(trainer: Any, error: Exception, saved: int) -> None:
    """Save the last complete step after an error; if that fails, a note of the error says so.

    If several processes train, none of them saves: the others may have reached another part of the
    step, or have ended.

    Args:
        trainer: The trainer whose `train` raised.
        error: The error.
        saved: The step of the last checkpoint; 0 if there is none.
    """
    step = trainer.state.global_step
    if ranks.count() > 1 or step == saved or not stock.generation_is_used_up(trainer.args, step):
        return
    try:
        trainer._save_checkpoint(trainer.model, None)
        trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
    except Exception as second:  # such as a full disk; the first error is raised
        error.add_note(f"step {step} could not be kept: {second}")


def newest_checkpoint(output_dir: str | Path) -> str | None:
    """Return the newest whole checkpoint of a trainer; None if there is none.

        trainer.train(resume_from_checkpoint=newest_checkpoint("outputs"))

    transformers would take the one of the latest step, which a killed process may have left half
    written. It writes trainer_state.json last.

    Args:
        output_dir: The trainer's `output_dir`.
    """
    steps = {}
    for path in Path(output_dir).glob("checkpoint-*/trainer_state.json"):
        try:
            steps[read_json(path)["global_step"]] = str(path.parent)
        except (ValueError, KeyError):  # it is half written
            continue
    return steps[max(steps)] if steps else None
