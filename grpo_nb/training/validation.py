"""Is the policy getting better on prompts it does not train on? Asked every n steps, greedily.

The prompts are held out of the training rows, so that the held-out rows, by which
notebook 4 judges, have no say in which adapter is kept.
"""

import time
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from grpo_nb import environments
from grpo_nb.answers import parse_number
from grpo_nb.models import Policy
from grpo_nb.reward_lab import bench_of
from grpo_nb.reward_lab.baseline import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.correctness import normalize
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.runs.config import RunConfig
from grpo_nb.runs.settings import TrainConfig

Row = Mapping[str, Any]


def prompts_to_hold_out(train: TrainConfig) -> int:
    """How many the settings ask for: none where nothing is validated."""
    return train.eval_prompts if train.eval_steps else 0


def hold_out(rows: Sequence[Row], count: int) -> tuple[list[Row], list[Row]]:
    """(rows to train on, rows to validate on): evenly spaced, at most a tenth of all.

    >>> train, held_out = hold_out([{"n": n} for n in range(40)], 2)
    >>> len(train), [row["n"] for row in held_out]
    (38, [0, 20])
    """
    count = min(count, len(rows) // 10)
    places = {place * len(rows) // count for place in range(count)} if count else set()
    train = [row for place, row in enumerate(rows) if place not in places]
    return train, [rows[place] for place in sorted(places)]


class Validation:
    """Answers the rows with the policy as it stands, and scores the answers.

    Args:
        policy: In the middle of its training; it and the random state are left as they were.
        rows: What `hold_out` gave.
        rewards: The run's set; its first says "correct".
        config: Lengths and batch size.
    """

    def __init__(
        self, policy: Policy, rows: Sequence[Row], rewards: RewardSet, config: RunConfig
    ) -> None:
        self.policy, self.rows, self.rewards, self.config = policy, rows, rewards, config
        self.bench = bench_of(config, rewards, policy.tokenizer)

    def __call__(self) -> dict[str, float]:
        """eval/accuracy, eval/exact, eval/format, eval/reward, eval/seconds."""
        started = time.perf_counter()
        groups = environments.answer(
            self.policy.engine,
            self.rows,
            self.bench.environment,
            max_completion_length=self.config.train.max_completion_length,
            batch_size=self.config.evaluate.eval_batch_size,
        )
        scores_P_F = self.bench.score(self.rows, [group[0].completion for group in groups])
        names, first_P = self.rewards.names, scores_P_F[:, 0]
        right_P = np.where(np.isfinite(first_P), passed({names[0]: first_P}, self.rewards), np.nan)
        figures = {"eval/accuracy": float(np.nanmean(right_P))}
        if name := self.rewards.format_name:
            figures["eval/format"] = float(np.nanmean(scores_P_F[:, names.index(name)]))
        # Whatever the rewards say: a judge that is pleaded with pays for another answer.
        extract = self.rewards.extract
        answers = [extract(completion_text(group[0].completion)) or "" for group in groups]
        pairs = zip(answers, self.rows, strict=True)
        same_P = [_plain(answer) == _plain(str(row["answer"])) for answer, row in pairs]
        figures["eval/exact"] = float(np.mean(same_P))
        figures["eval/reward"] = float(np.nanmean(self.bench.totals(scores_P_F)))
        return figures | {"eval/seconds": time.perf_counter() - started}


def _plain(answer: str) -> Fraction | str:
    """A number, however it is written; any other answer up to case and spacing."""
    number = parse_number(answer)
    return normalize(answer) if number is None else number
