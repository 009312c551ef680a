"""Between a running training and who watches it: updates go out, requests come in."""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_nb.runs import Check, Stage
from grpo_nb.runs.signals import signals


class Controls:
    """What the person who watches asks for; the training looks after each step. Thread-safe."""

    def __init__(self) -> None:
        self.stop, self.save, self.evaluate = (threading.Event() for _ in range(3))


class Update(NamedTuple):
    """What a watcher is told after a step, and after a validation.

    line: the line of train/metrics.jsonl: TRL's keys (reward, rewards/<name>/mean and /std,
        frac_reward_zero_std, completions/mean_length and /clipped_ratio, entropy, kl,
        clip_ratio/…, grad_norm, learning_rate, step_time), "step", and ours:
        seconds/generation, seconds/reward, seconds/update, tokens_per_second, memory_gib,
        groups/reward_p10, _p50, _p90 (of the groups' mean rewards), groups/reward_std (mean
        spread within a group), rewards/<name>/group_std and /seconds; or, after a validation,
        eval/accuracy, eval/exact, eval/format, eval/reward, eval/seconds alone.
    total_steps: `train.max_steps`.
    completions: of this step, a dict each: question, completion, each reward, reward (the
        weighted total), advantage; empty after a validation.
    alerts: new ones; the state of a grave one is "stop".
    """

    line: dict[str, Any]
    total_steps: int
    completions: Sequence[dict[str, Any]]
    alerts: Sequence[Check]


Watcher = Callable[[Update], None]


class Progress:
    """A watcher that shows how far the training is."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def __call__(self, update: Update) -> None:
        reward, note = update.line.get("reward"), ""
        if "eval/accuracy" in update.line:
            note = f"validated: accuracy {update.line['eval/accuracy']:.1%}"
        elif reward is not None and math.isfinite(reward):
            note = f"reward {reward:.2f}"
        self.stage.progress(update.line["step"], update.total_steps, note)


@contextmanager
def stop_on_signals(controls: Controls) -> Iterator[list[int]]:
    """SIGINT (the interrupt button) and SIGTERM ask for a stop; a second one ends at once.

    Yields:
        The signals that came.
    """

    def ask() -> None:
        if len(came) > 1:
            raise KeyboardInterrupt
        print("stopping: this step is finished and a checkpoint saved; again to stop at once")
        controls.stop.set()

    with signals(ask) as came:
        yield came
