"""What TRL does not log: seconds of a phase, memory, how rewards spread in and over groups."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil

from grpo_nb.models import cuda_available
from grpo_nb.rewards.combine import is_async
from grpo_nb.rewards.contract import exits_are_errors

LEAST_SCALE = 1.0  # of fp16's loss; a gradient that is infinite even so is no overflow of scaling


class Measured:
    """Of a GRPOTrainer: more metrics, through TRL's own, so that trackers get them too."""

    _loss_failed = False

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        with self._timing("seconds/generation"):
            return super()._generate(*args, **kwargs)  # type: ignore[misc]

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any, *args: Any
    ) -> Any:
        funcs, names = self.reward_funcs, self.reward_func_names
        self.reward_funcs = list(map(self._timed, funcs, names))
        try:
            with self._timing("seconds/reward"):
                rewards_N_F = super()._calculate_rewards(  # type: ignore[misc]
                    inputs, prompts, completions, completion_ids, *args
                )
        finally:
            self.reward_funcs = funcs
        self._note("groups/distinct", distinct(completion_ids, self.num_generations))
        self._note_groups(rewards_N_F)
        return rewards_N_F

    def _timed(self, func: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The reward, and its seconds noted; TRL awaits it if it is async."""
        key = f"rewards/{name}/seconds"

        def call(**columns: Any) -> Any:
            with self._timing(key), exits_are_errors(name):
                return func(**columns)

        async def awaited(**columns: Any) -> Any:
            with self._timing(key), exits_are_errors(name):
                return await func(**columns)

        return awaited if is_async(func) else call

    @contextmanager
    def _timing(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._note(name, time.perf_counter() - started)

    def _note_groups(self, rewards_N_F: Any) -> None:
        import torch

        group = self.num_generations
        total_N = (rewards_N_F * self.reward_weights.to(rewards_N_F.device)).nansum(dim=1)
        groups_P_G = total_N.view(-1, group)
        means_P = groups_P_G.mean(dim=1)
        for percent, value in zip((10, 50, 90), _quantiles(means_P), strict=True):
            self._note(f"groups/reward_p{percent}", value)
        self._note("groups/reward_std", groups_P_G.std(dim=1).mean().item())
        spread_F = torch.nan_to_num(rewards_N_F).view(-1, group, rewards_N_F.shape[1])
        for name, value in zip(
            self.reward_func_names, spread_F.std(dim=1).mean(dim=0).tolist(), strict=True
        ):
            self._note(f"rewards/{name}/group_std", value)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        # transformers replaces such a loss by the average of those before.
        self._loss_failed |= not math.isfinite(loss.item())
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            if self._loss_failed:
                logs["loss"], self._loss_failed = math.nan, False
            logs.update(self._of_the_step())
        super().log(logs, start_time)  # type: ignore[misc]

    def _of_the_step(self) -> dict[str, float]:
        known = {key: sum(values) for key, values in self._metrics["train"].items() if values}
        seconds = known.get("step_time", math.nan)
        phases = known.get("seconds/generation", 0.0) + known.get("seconds/reward", 0.0)
        count = self.args.generation_batch_size
        tokens = known.get("completions/mean_length", 0.0) * count
        return {
            "seconds/update": seconds - phases,
            "tokens_per_second": tokens / seconds,
            "memory_gib": memory_gib(),
        }

    def _note(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)


def distinct(completion_ids: Sequence[Sequence[int]], size: int) -> float:
    """How much the completions of a group differ, from 0 (all equal) to 1 (no two), mean of groups.

    Where processes share a step, groups may be spread over them: then NaN, which is not logged.

    >>> distinct([[1, 2], [1, 2], [1, 3], [4]], size=2)
    0.5
    """
    if len(completion_ids) % size:
        return math.nan
    rows = [tuple(ids) for ids in completion_ids]
    different = [len(set(rows[start : start + size])) for start in range(0, len(rows), size)]
    return sum(count - 1 for count in different) / max(1, size - 1) / len(different)


def _quantiles(values: Any) -> list[float]:
    import torch

    return torch.quantile(values, torch.tensor([0.1, 0.5, 0.9], device=values.device)).tolist()


def memory_gib() -> float:
    """The greatest memory of the GPU so far; without one, what this process holds now."""
    import torch

    held = (
        torch.cuda.max_memory_allocated()
        if cuda_available()
        else psutil.Process().memory_info().rss
    )
    return held / 2**30


def scale_can_fall(trainer: Any) -> bool:
    """Whether the loss of an fp16 training is scaled up, so that a gradient may overflow by that.

    torch's GradScaler begins at 65,536 and halves its scale after each such step.
    """
    scaler = trainer.accelerator.scaler
    return scaler is not None and scaler.get_scale() > LEAST_SCALE


def is_out_of_memory(error: BaseException) -> bool:
    from accelerate.utils.memory import should_reduce_batch_size

    return isinstance(error, MemoryError) or should_reduce_batch_size(error)
