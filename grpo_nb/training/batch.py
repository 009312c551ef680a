"""How a step's completions are cut into micro-batches: arithmetic alone."""

from typing import NamedTuple


class Batch(NamedTuple):
    """The two settings of `train` that say how a step's completions are cut."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int


def solve_batch(
    prompts_per_step: int, num_generations: int, max_rows_in_memory: int, processes: int = 1
) -> Batch:
    """The largest micro-batch that fits, so that all of them together make the step.

    TRL wants whole groups in a step: per-device batch x accumulation x processes has to be
    prompts x group. A group may be cut between micro-batches, for advantages are computed before.

    Args:
        prompts_per_step: Prompts that one optimizer step learns from, on all processes.
        num_generations: Completions per prompt: the group.
        max_rows_in_memory: Completions that one micro-batch may hold, on one process.
        processes: That share the step.

    Raises:
        ValueError: The processes cannot share the step evenly (the nearest number of prompts
            is given), or a count is too small.

    >>> solve_batch(prompts_per_step=4, num_generations=8, max_rows_in_memory=12)
    Batch(per_device_train_batch_size=8, gradient_accumulation_steps=4)
    """
    if num_generations < 2 or min(prompts_per_step, max_rows_in_memory, processes) < 1:
        raise ValueError(
            f"{prompts_per_step} prompts x {num_generations} completions in micro-batches of "
            f"{max_rows_in_memory} on {processes} processes: a group has at least 2, the "
            "others at least 1"
        )
    completions = prompts_per_step * num_generations
    if completions % processes:
        step = next(n for n in range(1, processes + 1) if n * num_generations % processes == 0)
        nearest = max(1, round(prompts_per_step / step)) * step
        raise ValueError(
            f"{prompts_per_step} prompts x {num_generations} completions = {completions} cannot be "
            f"shared by {processes} processes: take {nearest} prompts"
        )
    share = completions // processes
    rows = next(n for n in range(min(max_rows_in_memory, share), 0, -1) if share % n == 0)
    return Batch(rows, share // rows)
