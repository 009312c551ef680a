"""Describe a step of a training to whoever watches it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from grpo_nb.checks import Check


class Update(NamedTuple):
    """Describe a step or a validation to a watcher.

    line: The line of metrics.jsonl. After a step, its keys are TRL's (reward,
        rewards/<name>/mean and /std, frac_reward_zero_std, completions/mean_length and
        /clipped_ratio, entropy, kl, clip_ratio/…, grad_norm, learning_rate, step_time), "step",
        and with a run's trainer seconds/generation, seconds/reward, seconds/update,
        tokens_per_second, memory_gib and groups/distinct.
        After a validation, the keys are "step", eval/reward, eval/accuracy (if a reward is known to
        say what is right), and with a run's trainer eval/exact, eval/format and eval/seconds.
    total_steps: The number of steps of the training.
    completions: The completions of this step, one dict each: question, completion, each reward,
        reward (the weighted total) and advantage; empty after a validation.
    alerts: The new alerts; the state of a serious one is "stop".
    """

    line: dict[str, Any]
    total_steps: int
    completions: Sequence[dict[str, Any]]
    alerts: Sequence[Check]


Watcher = Callable[[Update], None]
