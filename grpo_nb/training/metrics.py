"""What a training leaves on disk: a line of metrics a step, and every completion."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb.pilot import passed
from grpo_nb.prompts import completion_text
from grpo_nb.rewards import RewardSet
from grpo_nb.runs import Run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def append_line(path: Path, content: dict[str, Any]) -> None:
    """One JSON line; a NaN is null."""
    values = content.items()
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(finite) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
    files = sorted((run / "train/completions").glob("*.parquet"))
    raw = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    frame = raw[["step", *preset.names, "advantage"]].copy()
    frame.insert(1, "question", [prompt[-1]["content"] for prompt in raw["prompt"]])
    texts = [completion_text(list(completion)) for completion in raw["completion"]]
    frame.insert(2, "completion", texts)
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    frame["tokens"] = [len(ids) for ids in encoded]
    frame["correct"] = passed(frame, preset)
    frame["truncated"] = frame["tokens"] >= cap_tokens
    return frame
