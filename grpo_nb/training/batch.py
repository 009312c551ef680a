"""Divide a step's completions into micro-batches."""

import math
from typing import NamedTuple


class Batch(NamedTuple):
    """Hold the two settings of `train` that divide a step's completions into micro-batches."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int


def solve_batch(
    prompts_per_step: int, num_generations: int, max_rows_in_memory: int, processes: int = 1
) -> Batch:
    """Return the largest micro-batch that fits and divides the step evenly.

    TRL needs whole groups in a step: per-device batch x accumulation x processes has to be
    prompts x group. A group may be spread over micro-batches, since advantages are computed
    beforehand.

    Args:
        prompts_per_step: Prompts of one optimizer step, on all processes.
        num_generations: Completions per prompt (the group).
        max_rows_in_memory: Completions that a micro-batch may hold, on one process.
        processes: Processes that share the step.

    Raises:
        ValueError: The processes cannot share the step evenly; the message suggests numbers of
            prompts that fit.

    >>> solve_batch(prompts_per_step=4, num_generations=8, max_rows_in_memory=12)
    Batch(per_device_train_batch_size=8, gradient_accumulation_steps=4)
    """
    completions = prompts_per_step * num_generations
    if completions % processes:
        multiple = processes // math.gcd(num_generations, processes)
        raise ValueError(
            f"{prompts_per_step} prompts x {num_generations} completions = {completions} do not "
            f"divide evenly among {processes} processes: use a multiple of {multiple} prompts"
        )
    share = completions // processes
    rows = next(n for n in range(min(max_rows_in_memory, share), 0, -1) if share % n == 0)
    return Batch(rows, share // rows)
