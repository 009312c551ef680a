"""Compute metrics that TRL lacks."""

import json
import math
import resource
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import psutil

from grpo_nb.files import atomic_path, read_json, read_lines
from grpo_nb.models import cuda_available
from grpo_nb.rewards.prompts import digest

if TYPE_CHECKING:
    import torch


def forget_after(folder: Path, steps: int) -> None:
    """Remove what training wrote after a checkpoint, because those steps are trained again.

    Args:
        folder: The run's train/, with metrics, alerts, completions and the best adapter.
        steps: The step of the checkpoint; 0 without a checkpoint.
    """
    for name in ("metrics.jsonl", "alerts.jsonl"):
        lines = [line for line in read_lines(folder / name) if steps and line["step"] <= steps]
        with atomic_path(folder / name) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = folder / "best"
    if (best / "eval.json").is_file() and read_json(best / "eval.json")["step"] > steps:
        shutil.rmtree(best)
    for path in (folder / "completions").glob("*.parquet"):
        if int(path.stem.rpartition("_")[2]) > steps:
            path.unlink()


def digests(images: Iterable[Any]) -> str:
    """Return the digests of images as one string, in the format of the completions log."""
    return " ".join(map(digest, images))


def of_a_step(metrics: Mapping[str, list[float]], completions: int) -> dict[str, float]:
    """Return a step's metrics that TRL lacks: update time, tokens per second, and memory.

    Args:
        metrics: TRL's metrics since the last log.
        completions: The number of completions of the step.
    """
    totals = {key: sum(values) for key, values in metrics.items() if values}
    seconds = totals.get("step_time", math.nan)
    phases = totals.get("seconds/generation", 0.0) + totals.get("seconds/reward", 0.0)
    return {
        "seconds/update": seconds - phases,
        "tokens_per_second": totals.get("completions/mean_length", 0.0) * completions / seconds,
        "memory_gib": peak_memory() / 2**30,
    }


def peak_memory() -> int:
    """Return the peak memory [bytes] since `new_peak`, of the GPU or else of this process."""
    import torch

    if cuda_available():
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def new_peak() -> None:
    """Reset the peak memory usage; if the system forbids that, the old peak remains."""
    import torch

    if cuda_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        with suppress(OSError):  # a container may forbid it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_now() -> tuple[int, int]:
    """Return (used, usable) memory [bytes] of the GPU, or else of this process."""
    import torch

    if cuda_available():
        free = torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated(), free + torch.cuda.memory_reserved()
    resident = psutil.Process().memory_info().rss
    return resident, resident + psutil.virtual_memory().available


def asleep(trainer: Any) -> int:
    """Return the size of a sleeping vLLM's cache, which torch still counts as in use [bytes]."""
    args = trainer.args
    if not (trainer.use_vllm and args.vllm_enable_sleep_mode and args.vllm_mode == "colocate"):
        return 0
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(block.handle[1] for block in blocks if block.tag == "kv_cache")


def spread(
    rewards_N_F: "torch.Tensor", totals_N: "torch.Tensor", group: int, names: Sequence[str]
) -> dict[str, float]:
    """Measure how scores differ between groups, and within them.

    Args:
        rewards_N_F: Scores of the completions, group after group; NaN stands for None.
        totals_N: Weighted totals of the completions.
        group: Completions per group.
        names: Names of the rewards.
    """
    import torch

    totals_P_G = totals_N.view(-1, group)
    means_P = totals_P_G.mean(dim=1)
    figures = {f"groups/reward_p{p}": means_P.quantile(p / 100).item() for p in (10, 50, 90)}
    figures["groups/reward_std"] = totals_P_G.std(dim=1).mean().item()
    rewards_P_G_F = torch.nan_to_num(rewards_N_F).view(-1, group, rewards_N_F.shape[1])
    for name, value in zip(names, rewards_P_G_F.std(dim=1).mean(dim=0).tolist(), strict=True):
        figures[f"rewards/{name}/group_std"] = value
    return figures


def distinct(completion_ids: Sequence[Sequence[int]], size: int) -> float:
    """Return the mean share of distinct completions per group: 0 if all are equal, 1 if all differ.

    If groups are spread over several processes, the result is NaN, which is not logged.

    >>> distinct([[1, 2], [1, 2], [1, 3], [4]], size=2)
    0.5
    """
    if len(completion_ids) % size:
        return math.nan
    groups = pd.Series(map(tuple, completion_ids)).groupby(np.arange(len(completion_ids)) // size)
    return float(groups.nunique().mean() - 1) / max(1, size - 1)
