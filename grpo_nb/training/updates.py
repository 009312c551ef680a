"""Between a running training and who watches it: updates go out, requests come in."""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from grpo_nb.runs import Check, Stage


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
        eval/accuracy, eval/format, eval/reward, eval/seconds alone.
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
    """A watcher that shows text which updates in place, and needs no widgets."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self._handle = stage, None

    def __call__(self, update: Update) -> None:
        line = update.line
        done = line["step"]
        if "eval/accuracy" in line:
            note = f"validated: accuracy {line['eval/accuracy']:.1%}"
        elif "reward" in line:
            scored = line["reward"] is not None and math.isfinite(line["reward"])
            note = f"reward {line['reward']:.2f}" if scored else "no scores, and so no update"
        else:
            note = "one more update with the same completions"
        self.stage.progress(done, update.total_steps, note)
        filled = round(30 * done / update.total_steps)
        bar = f"{'█' * filled}{'░' * (30 - filled)}"
        self._show({"text/plain": f"{bar} step {done}/{update.total_steps}  {note}"})

    def _show(self, text: dict[str, Any]) -> None:
        from IPython import get_ipython
        from IPython.display import display

        if get_ipython() is None:
            return
        if self._handle is None:
            self._handle = display(text, raw=True, display_id=True)
        else:
            self._handle.update(text, raw=True)


@contextmanager
def stop_on_signals(controls: Controls) -> Iterator[list[int]]:
    """SIGINT (the interrupt button) and SIGTERM ask for a stop; a second one ends at once.

    Yields:
        The signals that came.
    """
    came: list[int] = []

    def ask(number: int, frame: Any) -> None:
        came.append(number)
        if len(came) > 1:
            raise KeyboardInterrupt
        print("stopping: this step is finished and a checkpoint saved; again to stop at once")
        controls.stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield came  # signals belong to the main thread
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
