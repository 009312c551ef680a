"""Read the completions of a run's training."""

from typing import TYPE_CHECKING

import pandas as pd

from grpo_nb.reward_lab.table import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import message_text, transcript
from grpo_nb.training import logs

if TYPE_CHECKING:
    from grpo_nb.runs import Run

SHUFFLED = "a placebo: these scores are shuffled within each group, and not what each text earned"


def read_completions(run: "Run", preset: RewardSet) -> pd.DataFrame:
    """Return every completion of a training run, as a table.

    Args:
        run: A trained run.
        preset: Its rewards; the first one decides what is correct.

    Returns:
        The columns step, question, reference, completion, each reward, advantage and correct. If a
        placebo shuffled the rewards, a sentence about this is printed.
    """
    table = logs.read_completions(run / "train")
    table["question"] = [message_text(prompt[-1]) for prompt in table["prompt"]]
    table["completion"] = list(map(transcript, table["completion"]))
    texts = ["step", "question", "reference", "completion"]
    table = table.reindex(columns=[*texts, *preset.names, "advantage"])
    table["correct"] = passed(table, preset)
    if run.config().train.placebo == "shuffled":
        print(SHUFFLED)
    return table
