"""Read the completions of a run's training."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import data
from grpo_nb.reward_lab.table import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import message_text, transcript
from grpo_nb.training.metrics import digests

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs import Run

SHUFFLED = "a placebo: these scores are shuffled within each group, and not what each text earned"


def read_completions(
    run: "Run", preset: RewardSet, tokenizer: "PreTrainedTokenizerBase", cap_tokens: int
) -> pd.DataFrame:
    """Return every completion of a training run, as a table.

    Args:
        run: A trained run.
        preset: Its rewards; the first one decides what is correct.
        tokenizer: The tokenizer, which counts a completion's tokens.
        cap_tokens: The length at which a completion was truncated.

    Returns:
        The columns step, question, reference, completion, each reward, advantage, tokens, correct
        and truncated. If a placebo shuffled the rewards, a sentence about this is printed.
    """
    files = sorted((run / "train/completions").glob("*.parquet"))
    raw = pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)
    frame = raw.reindex(columns=["step", *preset.names, "advantage"])
    frame.insert(1, "question", [message_text(prompt[-1]) for prompt in raw["prompt"]])
    texts = list(map(transcript, raw["completion"]))
    rows = data.load(run, "train")
    keys = [_key(row["prompt"], digests(row.get("images", ()))) for row in rows]
    answers = dict(zip(keys, [row["answer"] for row in rows], strict=True))
    images = raw["images"] if "images" in raw else [""] * len(raw)
    frame.insert(2, "reference", list(map(answers.get, map(_key, raw["prompt"], images))))
    frame.insert(3, "completion", texts)
    frame["tokens"] = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    frame["correct"] = passed(frame, preset)
    frame["truncated"] = frame["tokens"] >= cap_tokens
    if run.config().train.placebo == "shuffled":
        print(SHUFFLED)
    return frame


def _key(prompt: Iterable[Mapping[str, Any]], images: str) -> tuple[str, ...]:
    return (*map(message_text, prompt), images)
