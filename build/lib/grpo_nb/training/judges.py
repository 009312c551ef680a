"""Monitor a judge during training: what its scores correlate with, and whether they drift."""

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_nb.reward_lab.certificate import judges
from grpo_nb.rewards import LLMJudge, call
from grpo_nb.rewards.judge import question

if TYPE_CHECKING:
    from grpo_nb.training.trainer import Trainer

DRIFT_STEPS = 10  # every so many steps, the judge scores completions of step 1 again
DRIFT_GROUPS = 4  # groups of step 1 that the judge scores again
MARKUP = r"[#*_`|<>\[\]]"
TINY = 1e-6  # a smaller spread is a rounding error
REASONS = 200  # how many of the latest reasons supply the words that define the judge's style


def figures(trainer: "Trainer", step: int, completions: list[dict[str, Any]]) -> dict[str, float]:
    """Return each judge's metrics for a step: habits, and drift on every DRIFT_STEPS-th step.

    Args:
        trainer: The trainer, on the first process.
        step: Number of the step.
        completions: The step's completions, with question and scores.
    """
    metrics: dict[str, float] = {}
    first = trainer.folder / "completions/completions_00001.parquet"
    for judge in judges(trainer.rewards):
        others = [name for name in trainer.rewards.names if name != judge.name]
        with suppress(RuntimeError, ValueError):  # a lasting fault is raised in the next step
            metrics |= habits(judge, others, pd.DataFrame(completions))
            if step % DRIFT_STEPS == 0 and first.is_file():
                metrics[f"{judge.name}/drift"] = drift(judge, trainer, pd.read_parquet(first))
    return metrics


def habits(judge: LLMJudge, others: list[str], table: pd.DataFrame) -> dict[str, float]:
    """Measure how scores correlate with length, markup and the judge's own words, within groups.

    The part that the other rewards explain is removed first, because right answers may be longer.

    Args:
        judge: The judge, whose replies contain its reasons.
        others: Names of the other rewards.
        table: One line per completion: question, completion, and the scores.
    """
    name, texts = judge.name, table["completion"]
    replies = list(judge.replies.values())[-REASONS:]
    style = {word for reply in replies for word in reply["reason"].lower().split()}
    words = texts.str.lower().str.split()
    habits = {
        f"{name}/length": texts.str.len(),
        f"{name}/markup": texts.str.count(MARKUP),
        f"{name}/style": [len(style.intersection(each)) / max(1, len(set(each))) for each in words],
    }
    frame = table[[name, *others]].assign(**habits)
    within = (frame - frame.groupby(table["question"]).transform("mean")).fillna(0)
    scores, rest, features = (within[key].to_numpy() for key in (name, others, list(habits)))
    features = features - rest @ np.linalg.lstsq(rest, features, rcond=None)[0]
    sizes = np.linalg.norm(features, axis=0) * np.linalg.norm(scores)
    products = zip(habits, scores @ features, sizes, strict=True)
    return {habit: float(product / size) for habit, product, size in products if size > TINY}


def drift(judge: LLMJudge, trainer: "Trainer", table: pd.DataFrame) -> float:
    """Return the mean absolute change in the judge's scores for completions that it scored before.

    The judge is asked without cache and without retries. If it does not answer, the result is NaN.

    Args:
        judge: The judge.
        trainer: The trainer, whose rows have the reference answers.
        table: The completions of a step, as TRL stores them.
    """
    table = table.head(DRIFT_GROUPS * trainer.num_generations)
    texts = table[["prompt", "completion"]].map(lambda v: v if isinstance(v, str) else list(v))
    answers = {question(row["prompt"]): row.get("answer") for row in trainer.train_dataset}
    expected = [answers.get(question(prompt)) for prompt in texts["prompt"]]
    scores = call(
        judge.changed(cache=False, retries=0),
        prompts=texts["prompt"].tolist(),
        completions=texts["completion"].tolist(),
        answer=None if None in expected else expected,
    )
    return (pd.Series(scores, dtype=float) - table[judge.name]).abs().mean()
