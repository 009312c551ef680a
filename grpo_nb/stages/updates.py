"""Pass the trainer's progress to its stage, and signals of the system to the trainer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from grpo_nb.signals import signals
from grpo_nb.updates import Buttons, Update, Watcher

if TYPE_CHECKING:
    from grpo_nb.runs import Stage


def progress_of(stage: "Stage") -> Watcher:
    """Return a watcher that shows how far along the training is."""

    def show(update: Update) -> None:
        line, note = update.line, ""
        if "eval/accuracy" in line:
            note = f"validated: accuracy {line['eval/accuracy']:.1%}"
        elif line.get("reward") is not None:
            note = f"reward {line['reward']:.2f}"
        stage.progress(line["step"], update.total_steps, note)

    return show


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
