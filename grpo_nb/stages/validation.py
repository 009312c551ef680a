"""Measure during training, with greedy completions, whether the policy improves on other prompts.

These prompts are held out of the training rows. The evaluation split of notebook 4 is not used to
choose the adapter.
"""

import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb import environments
from grpo_nb.answers import parse_number
from grpo_nb.evaluation.evaluate import score_rows
from grpo_nb.models import Policy
from grpo_nb.reward_lab import bench_of
from grpo_nb.reward_lab.table import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.library import normalize

if TYPE_CHECKING:
    from grpo_nb.runs.config import RunConfig
    from grpo_nb.runs.settings import TrainConfig

Row = Mapping[str, Any]


def prompts_to_hold_out(train: "TrainConfig") -> int:
    """Return the largest number of prompts to hold out for validation; 0 without validation."""
    return train.eval_prompts if train.eval_steps else 0


def hold_out(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """Split off `count` evenly spaced rows for validation, but at most a tenth of all rows.

    >>> train, held_out = hold_out([{"n": n} for n in range(40)], 2)
    >>> len(train), [row["n"] for row in held_out]
    (38, [0, 20])
    """
    count = min(count, len(rows) // 10)
    places = {place * len(rows) // count for place in range(count)} if count else set()
    train = [row for place, row in enumerate(rows) if place not in places]
    return train, [rows[place] for place in sorted(places)]


class Validation:
    """Answer rows with the policy as it is now, and score the answers.

    Args:
        policy: The policy; validation changes neither the policy nor the random state.
        rows: Rows from `hold_out`.
        rewards: The run's rewards; their `correct_func` decides what is correct.
        config: The run's settings.
    """

    def __init__(
        self, policy: Policy, rows: Sequence[Row], rewards: RewardSet, config: "RunConfig"
    ) -> None:
        self.policy, self.rows, self.rewards, self.config = policy, rows, rewards, config
        self.bench = bench_of(config, rewards, policy.tokenizer)

    def __call__(self) -> dict[str, float]:
        """Return eval/accuracy, /exact, /format (with a format reward), /reward and /seconds."""
        start = time.perf_counter()
        groups = environments.answer(
            self.policy.engine,
            self.rows,
            self.bench.environment,
            max_completion_length=self.config.grpo.max_completion_length,
            batch_size=self.config.evaluate.eval_batch_size,
        )
        table, name = score_rows(self.rows, groups, self.bench), self.rewards.correct_func.__name__
        right = np.where(np.isfinite(table[name]), passed(table, self.rewards), np.nan)
        figures = {"eval/accuracy": float(np.nanmean(right))}
        if form := self.rewards.format_name:
            figures["eval/format"] = float(np.nanmean(table[form]))
        # This figure does not depend on the rewards: a judge may accept wrong answers.
        pairs = zip(table["answer"].fillna(""), self.rows, strict=True)
        same = [_plain(answer) == _plain(str(row["answer"])) for answer, row in pairs]
        figures["eval/exact"] = float(np.mean(same))
        figures["eval/reward"] = float(np.nanmean(table["reward"]))
        return figures | {"eval/seconds": time.perf_counter() - start}


def _plain(answer: str) -> Fraction | str:
    """Return an answer's number, however it is written, or its text in normalized form."""
    number = parse_number(answer)
    return normalize(answer) if number is None else number
