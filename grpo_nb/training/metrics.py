"""What is measured of a training beside TRL's metrics, and what it leaves on disk."""

import json
import math
import resource
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from grpo_nb import data, environments
from grpo_nb.models import cuda_available, tool_calls
from grpo_nb.reward_lab.baseline import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import Message, transcript
from grpo_nb.runs import Run, atomic_path
from grpo_nb.runs.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.training.trainer import Trainer

SHUFFLED = "a control: these scores are shuffled within each group, and not what a text earned"


def append_line(path: Path, content: dict[str, Any]) -> None:
    """One JSON line; a NaN is null."""
    values = content.items()
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every whole line; the last may be torn, where the process was killed in it."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    lines = text.splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def forget_after(folder: Path, steps: int) -> None:
    """Forget what came after a checkpoint, for it will come again.

    Args:
        folder: The run's train/: metrics, alerts, completions and the best adapter.
        steps: That the checkpoint holds.
    """
    for name in ("metrics.jsonl", "health.jsonl"):
        kept = [line for line in read_lines(folder / name) if steps and line["step"] <= steps]
        with atomic_path(folder / name) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    best = folder / "best"
    if (best / "eval.json").is_file() and read_json(best / "eval.json")["step"] > steps:
        shutil.rmtree(best)
    for path in (folder / "completions").glob("*.parquet"):
        if int(path.stem.rpartition("_")[2]) > steps:
            path.unlink()


def read_completions(
    run: Run, preset: RewardSet, tokenizer: "PreTrainedTokenizerBase", cap_tokens: int
) -> pd.DataFrame:
    """Every completion of the training, as a table.

    Args:
        run: A trained run.
        preset: Its rewards; the first says "correct".
        tokenizer: Counts a completion's tokens.
        cap_tokens: A completion that long was truncated.

    Returns:
        step, question, reference, completion, each reward, advantage, tokens, correct, truncated;
        of a control with shuffled rewards a note, in `attrs`, that `views.completions` shows.
    """
    files = sorted((run / "train/completions").glob("*.parquet"))
    raw = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    frame = raw.reindex(columns=["step", *preset.names, "advantage"])
    frame.insert(1, "question", [prompt[-1]["content"] for prompt in raw["prompt"]])
    texts = list(map(logged_text, raw["completion"]))
    answers = {_said(row["prompt"]): row["answer"] for row in data.load(run, "train")}
    frame.insert(2, "reference", [answers.get(_said(prompt)) for prompt in raw["prompt"]])
    frame.insert(3, "completion", texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    frame["tokens"] = [len(ids) for ids in encoded]
    frame["correct"] = passed(frame, preset)
    frame["truncated"] = frame["tokens"] >= cap_tokens
    if run.config().train.control == "shuffled":
        frame.attrs["note"] = SHUFFLED
    return frame


def _said(prompt: Iterable[Mapping[str, str]]) -> tuple[str, ...]:
    return tuple(message["content"] for message in prompt)


def logged_text(messages: Iterable[Mapping[str, Any]]) -> str:
    """The transcript of messages as `loggable` wrote them: their calls were text."""
    called = [json.loads(one.get("tool_calls") or "[]") for one in messages]
    pairs = zip(messages, called, strict=True)
    return transcript([one | {"tool_calls": calls} for one, calls in pairs])


def of_episodes(
    completions: Sequence[Sequence[Message]],
    totals: Sequence[float],
    tokenizer: "PreTrainedTokenizerBase",
) -> dict[str, float]:
    """What the episodes of a step did with their tools.

    Args:
        completions: [episodes] messages.
        totals: [episodes] weighted total of the rewards.
        tokenizer: Of the policy.

    Returns:
        Shares of the episodes with a call, with a malformed one, and of those that a limit ended in
        a call; tool errors a call; turns with calls; and how much more an episode with a call
        earns than one without (NaN where all are alike).
    """
    opens = tool_calls.opens_call(tokenizer)
    found = pd.DataFrame([environments.figures(messages, opens) for messages in completions])
    called, earned = found["calls"] > 0, pd.Series(list(totals))
    return {
        "episodes/call_share": called.mean(),
        "episodes/malformed": (found["malformed"] > 0).mean(),
        "episodes/at_limit": found["at_limit"].mean(),
        "episodes/tool_errors": found["tool_errors"].sum() / max(1.0, found["calls"].sum()),
        "episodes/turns": found["turns"].mean(),
        "episodes/gain": earned[called].mean() - earned[~called].mean(),
    }


def loggable(messages: Any) -> Any:
    """An episode's messages with calls as text, for their arguments may be of any type.

    TRL logs the same completions again where several steps learn from one generation.
    """
    if isinstance(messages, str):
        return messages
    called = [isinstance(one.get("tool_calls"), list) for one in messages]
    return [
        one | {"tool_calls": json.dumps(one["tool_calls"], default=str)} if calls else one
        for one, calls in zip(messages, called, strict=True)
    ]


def of_a_step(logged: Mapping[str, list[float]], completions: int) -> dict[str, float]:
    """What TRL does not log of a step: the update's seconds, tokens a second, memory.

    Args:
        logged: TRL's metrics since the last log.
        completions: Generated for the step.
    """
    known = {key: sum(values) for key, values in logged.items() if values}
    seconds = known.get("step_time", math.nan)
    phases = known.get("seconds/generation", 0.0) + known.get("seconds/reward", 0.0)
    return {
        "seconds/update": seconds - phases,
        "tokens_per_second": known.get("completions/mean_length", 0.0) * completions / seconds,
        "memory_gib": peak_memory() / 2**30,
    }


def peak_memory() -> int:
    """Return the greatest memory of the GPU, or else of this process, since `new_peak` [bytes]."""
    import torch

    if cuda_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def new_peak() -> None:
    """Begin a new peak; where the system does not allow that, it stays the peak of the life."""
    import torch

    if cuda_available():
        torch.cuda.reset_peak_memory_stats()
    elif sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def memory_now() -> tuple[int, int]:
    """Return the bytes in use, and those in use or free, of the GPU or else for this process."""
    import torch

    if cuda_available():
        free = torch.cuda.mem_get_info()[0]
        return torch.cuda.memory_allocated(), free + torch.cuda.memory_reserved()
    resident = psutil.Process().memory_info().rss
    return resident, resident + psutil.virtual_memory().available


def asleep(trainer: "Trainer") -> int:
    """Return the bytes of vLLM's cache that torch counts as in use, although the engine sleeps."""
    args = trainer.args
    if not (trainer.use_vllm and args.vllm_enable_sleep_mode and args.vllm_mode == "colocate"):
        return 0
    from vllm.device_allocator.cumem import CuMemAllocator

    blocks = CuMemAllocator.get_instance().pointer_to_data.values()
    return sum(block.handle[1] for block in blocks if block.tag == "kv_cache")


def spread(
    rewards_N_F: "torch.Tensor", totals_N: "torch.Tensor", group: int, names: Sequence[str]
) -> dict[str, float]:
    """How scores differ between groups, and within them.

    Args:
        rewards_N_F: Of completions, group after group; NaN for None.
        totals_N: Their weighted totals.
        group: Completions in each.
        names: Of the rewards.
    """
    import torch

    totals_P_G = totals_N.view(-1, group)
    means_P = totals_P_G.mean(dim=1)
    found = {f"groups/reward_p{p}": means_P.quantile(p / 100).item() for p in (10, 50, 90)}
    found["groups/reward_std"] = totals_P_G.std(dim=1).mean().item()
    of_rewards = torch.nan_to_num(rewards_N_F).view(-1, group, rewards_N_F.shape[1]).std(dim=1)
    stds = zip(names, of_rewards.mean(dim=0).tolist(), strict=True)
    return found | {f"rewards/{name}/group_std": value for name, value in stds}


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
