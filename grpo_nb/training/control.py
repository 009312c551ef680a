"""Between a running training and who watches it: updates go out, wishes come in."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_nb.training.health import Alert


class Controls:
    """Wishes of the person who watches; the training looks after each step. Thread-safe."""

    def __init__(self) -> None:
        self.stop, self.save, self.evaluate = (threading.Event() for _ in range(3))


class Update(NamedTuple):
    """What a watcher is told after a step, and after a validation.

    line: the line of train/metrics.jsonl: TRL's keys (reward, rewards/<name>/mean and /std,
        frac_reward_zero_std, completions/mean_length and /clipped_ratio, entropy, kl,
        clip_ratio/…, grad_norm, learning_rate, step_time), "step", "stage", and ours:
        seconds/generation, seconds/reward, seconds/update, tokens_per_second, memory_gib,
        groups/reward_p10, _p50, _p90 (of the groups' mean rewards), groups/reward_std (mean
        spread within a group), rewards/<name>/group_std and /seconds, with dynamic sampling
        dynamic/replaced, /without_signal, /seconds; or, after a validation,
        eval/accuracy, eval/format, eval/reward, eval/seconds alone.
    total_steps: of all stages.
    completions: of this step, a dict each: question, completion, each reward, reward (the
        weighted total), advantage; empty after a validation.
    alerts: new ones.
    """

    line: dict[str, Any]
    total_steps: int
    completions: Sequence[dict[str, Any]]
    alerts: Sequence[Alert]


Watcher = Callable[[Update], None]


@contextmanager
def stop_on_signals(controls: Controls) -> Iterator[list[int]]:
    """SIGINT (the interrupt button) and SIGTERM wish for a stop; a second one ends at once.

    Yields:
        The signals that came.
    """
    came: list[int] = []

    def wish(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        print("stopping: this step is finished and a checkpoint saved; again to stop at once")
        controls.stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield came  # signals belong to the main thread
        return
    before = {number: signal.signal(number, wish) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
