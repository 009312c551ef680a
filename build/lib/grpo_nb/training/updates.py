"""Pass the trainer's updates to its watchers, and a user's requests to the trainer."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_nb.runs import Check, Stage
from grpo_nb.runs.signals import signals


class Buttons:
    """Hold a user's requests to stop, save or evaluate, which the trainer reads after each step."""

    def __init__(self) -> None:
        self.stop, self.save, self.evaluate = (threading.Event() for _ in range(3))


class Update(NamedTuple):
    """Describe a step or a validation to a watcher.

    line: The line of train/metrics.jsonl. After a step, its keys are TRL's (reward,
        rewards/<name>/mean and /std, frac_reward_zero_std, completions/mean_length and
        /clipped_ratio, entropy, kl, clip_ratio/…, grad_norm, learning_rate, step_time), "step",
        and ours, among them seconds/generation, seconds/reward, seconds/update, tokens_per_second,
        memory_gib, groups/reward_p10, _p50, _p90 (of the groups' mean rewards),
        groups/reward_std (mean spread within a group), rewards/<name>/group_std and /seconds.
        After a validation, the keys are "step", eval/accuracy, eval/exact, eval/format,
        eval/reward and eval/seconds.
    total_steps: The setting `train.max_steps`.
    completions: The completions of this step, one dict each: question, completion, each reward,
        reward (the weighted total) and advantage; empty after a validation.
    alerts: The new alerts; the state of a serious one is "stop".
    """

    line: dict[str, Any]
    total_steps: int
    completions: Sequence[dict[str, Any]]
    alerts: Sequence[Check]


Watcher = Callable[[Update], None]


def progress_of(stage: Stage) -> Watcher:
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
