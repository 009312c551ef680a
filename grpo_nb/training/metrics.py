"""What a training leaves on disk: a line of metrics a step, and every completion."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb.reward_lab.pilot import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.runs import Run, atomic_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def keep_until(folder: Path, stage_folder: Path, first_step: int, steps: int) -> None:
    """Forget what came after a checkpoint, for it will come again.

    Args:
        folder: The run's train/: metrics and alerts.
        stage_folder: That of the stage: completions.
        first_step: Steps of the stages before.
        steps: Steps of this stage that the checkpoint holds.
    """
    for name in ("metrics.jsonl", "health.jsonl"):
        lines = read_lines(folder / name) if first_step + steps else []
        kept = [line for line in lines if line["step"] <= first_step + steps]
        with atomic_path(folder / name) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
    for path in (stage_folder / "completions").glob("*.parquet"):
        if int(path.stem.rpartition("_")[2]) > steps:
            path.unlink()


def stage_folders(folder: Path) -> list[Path]:
    """Of the GRPO stages below train/, in their order."""
    return sorted(folder.glob("[1-9]*-*"), key=lambda path: int(path.name.partition("-")[0]))


def read_completions(
    run: Run, preset: RewardSet, tokenizer: "PreTrainedTokenizerBase", cap_tokens: int
) -> pd.DataFrame:
    """Every completion of the training, for the browser.

    Args:
        run: A trained run.
        preset: Its rewards; the first says "correct".
        tokenizer: Counts a completion's tokens.
        cap_tokens: A completion that long was truncated.

    Returns:
        step, question, completion, each reward, advantage, tokens, correct, truncated.
    """
    parts, first = [], 0
    for folder in stage_folders(run / "train"):
        files = sorted((folder / "completions").glob("*.parquet"))
        part = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
        parts.append(part.assign(step=part["step"] + first))
        first = int(parts[-1]["step"].max())
    raw = pd.concat(parts, ignore_index=True)
    frame = raw.reindex(columns=["step", *preset.names, "advantage"])
    frame.insert(1, "question", [prompt[-1]["content"] for prompt in raw["prompt"]])
    texts = [completion_text(list(completion)) for completion in raw["completion"]]
    frame.insert(2, "completion", texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    frame["tokens"] = [len(ids) for ids in encoded]
    frame["correct"] = passed(frame, preset)
    frame["truncated"] = frame["tokens"] >= cap_tokens
    return frame
