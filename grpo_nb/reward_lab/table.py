"""The score table: what each completion earns, why, and the advantage it will have."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.environments import Environment, of, replay
from grpo_nb.models import chat, cuda_available
from grpo_nb.reward_lab import advantages
from grpo_nb.rewards import Reward, RewardSet, Scored, call, declared_range
from grpo_nb.rewards.prompts import Completion, completion_text, transcript
from grpo_nb.runs.config import RunConfig, TrainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
TRLS_ROW = ("prompt", "completion", "completion_ids")  # columns that no reward gets
TIE = 1e-6  # totals and advantages this close are equal but for rounding


class Bench(NamedTuple):
    """Rewards, and what they will meet in training.

    preset: The rewards and their weights.
    train: How advantages are made.
    tokenizer: Gives rewards of length the `completion_ids` that TRL gives them; without
        one they count words.
    unsloth_on_gpu: Whether Unsloth will train on a GPU, which changes `dr_grpo`.
    environment: What completions act in; rewards get its instances as `environments`, in the
        state in which the calls of a completion leave them.
    """

    preset: RewardSet
    train: TrainConfig = TrainConfig()
    tokenizer: "PreTrainedTokenizerBase | None" = None
    unsloth_on_gpu: bool = False
    environment: Environment | None = None

    def adding(self, func: Callable[..., Any], weight: float) -> "Bench":
        """The same bench with one more reward in its set."""
        return self._replace(preset=self.preset.adding(func, weight))

    def arguments(self, rows: Sequence[Row], completions: Sequence[Completion]) -> dict[str, Any]:
        """All that TRL calls a reward with; every call outside a training is made here.

        Args:
            rows: One dataset row for each completion (repeated per generation).
            completions: Strings or message lists; the reward gets what training gives it, which
                is messages where the prompt is a chat.
        """
        with chat.quiet():
            from transformers import TrainerState

        given = {key: [row[key] for row in rows] for key in rows[0] if key not in TRLS_ROW}
        given["prompts"] = [row["prompt"] for row in rows]
        given["completions"] = list(map(_as_in_training, given["prompts"], completions))
        if self.tokenizer is not None:
            texts = [transcript(completion) for completion in completions]
            encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            cut, end = self.train.max_completion_length, self.tokenizer.eos_token_id
            given["completion_ids"] = [ids if len(ids) >= cut else [*ids, end] for ids in encoded]
        if self.environment:
            given["environments"] = [
                replay(self.environment, row, completion)
                for row, completion in zip(rows, given["completions"], strict=True)
            ]
        # As at a training's start; an `Adaptive` reward counts no step of it.
        given["trainer_state"] = TrainerState(epoch=0.0, max_steps=self.train.max_steps)
        given["trainer_state"].is_training = False
        return given | {"log_extra": _ignore, "log_metric": _ignore}

    def score(self, rows: Sequence[Row], completions: Sequence[Completion]) -> np.ndarray:
        """Raw scores, [completions, rewards], NaN for None."""
        arguments = self.arguments(rows, completions)
        scores = [call(func, **arguments) for func in self.preset.reward_funcs]
        return np.array(scores, dtype=float).T

    def totals(self, scores: np.ndarray) -> np.ndarray:
        """Weighted total of each completion, [completions]."""
        return advantages.weighted_totals(scores, self.preset.reward_weights)

    def table(
        self, rows: Sequence[Row], completions_P_G: Sequence[Sequence[Completion]]
    ) -> pd.DataFrame:
        """One line a completion, groups one after another.

        Args:
            rows: [prompts] dataset rows.
            completions_P_G: [prompts][group] completions.

        Returns:
            question, reference, completion, answer (as extracted), each reward and its
            `<reward>/reason`, total, mean and std of the group, advantage, and signal:
            whether the advantages of the group differ at all.
        """
        group = len(completions_P_G[0])
        repeated = [row for row in rows for _ in range(group)]
        flat = [completion for completions in completions_P_G for completion in completions]
        arguments = self.arguments(repeated, flat)
        texts = [transcript(completion) for completion in flat]
        table = pd.DataFrame({"question": [row["question"] for row in repeated]})
        table["reference"] = [row["answer"] for row in repeated]
        table["completion"] = texts
        answers = [self.preset.extract(completion_text(completion)) for completion in flat]
        table["answer"] = pd.Series(answers, dtype=object)
        for func in self.preset.reward_funcs:
            scored = explain(func, arguments)
            table[func.__name__] = np.array([one.score for one in scored], dtype=float)
            table[f"{func.__name__}/reason"] = [one.reason for one in scored]
        return self.weighed(table, group)

    def weighed(self, table: pd.DataFrame, num_generations: int) -> pd.DataFrame:
        """The table with total, mean, std, advantage and signal computed again from its scores."""
        scores, train = table[self.preset.names].to_numpy(), self.train
        totals = self.totals(scores)
        groups = pd.Series(totals).groupby(np.arange(len(totals)) // num_generations)
        gained = advantages.advantages(
            scores,
            self.preset.reward_weights,
            num_generations,
            advantages.effective_scaling(train.scale_rewards, train.loss_type, self.unsloth_on_gpu),
            train.multi_objective_aggregation,
        )
        differ = np.ptp(gained.reshape(-1, num_generations), axis=1) > TIE
        return table.assign(
            total=totals,
            mean=groups.transform("mean").to_numpy(),
            std=groups.transform("std").to_numpy(),
            advantage=gained,
            signal=np.repeat(differ, num_generations),
        )


def bench_of(config: RunConfig, preset: RewardSet, tokenizer: Any = None) -> Bench:
    """The bench of a run: its rewards will meet there what they meet in the training."""
    return Bench(preset, config.train, tokenizer, cuda_available(), of(config))


def _ignore(*_: Any, **__: Any) -> None:
    """What a reward tells a training's log."""


def _as_in_training(prompt: Any, completion: Completion) -> Completion:
    """A completion in the form of its prompt: text, or one message of the assistant."""
    if isinstance(prompt, str) or not isinstance(completion, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def explain(func: Callable[..., Any], arguments: dict[str, Any]) -> list[Scored]:
    """Score and reason of each completion; rewards that are not ours give no reason.

    Raises:
        ValueError: The reward gave no score for each completion, or something that is no number.
    """
    if isinstance(func, Reward):
        return call(func.explain, **arguments)
    scores = call(func, **arguments)
    if len(scores) != len(arguments["completions"]):
        raise ValueError(
            f"reward {func.__name__} gave {len(scores)} scores for "
            f"{len(arguments['completions'])} completions: return one for each, None included"
        )
    if odd := [one for one in scores if one is not None and not hasattr(one, "__float__")]:
        raise ValueError(
            f"reward {func.__name__} gave {odd[0]!r:.60} among its scores for the completions: "
            "return a number or None for each"
        )
    return [Scored(score) for score in scores]


def signal_table(preset: RewardSet, table: pd.DataFrame) -> pd.DataFrame:
    """What each reward does on the sample: mean, std, share above its minimum, share of None."""
    scores = table[preset.names]
    lows = {func.__name__: declared_range(func)[0] for func in preset.reward_funcs}
    lines = {
        "mean": scores.mean(),
        "std": scores.std(),
        "share above minimum": scores.gt(pd.Series(lows)).mean(),
        "share None": scores.isna().mean(),
    }
    return pd.DataFrame(lines).rename_axis("reward").reset_index()
