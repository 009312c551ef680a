"""Tabulate each completion's scores, the reasons for them, and its advantage in training.

The arithmetic is that of trl.GRPOTrainer (1.15), including the treatment of None and NaN. In TRL,
`loss_type` does not change advantages; it only decides how an advantage is distributed over the
tokens of a completion. Unsloth on a GPU differs: with `loss_type="dr_grpo"` it does not scale
advantages (`effective_scaling`).
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.environments import Environment, of, replay
from grpo_nb.models import cuda_available, hub
from grpo_nb.reward_lab.scoring import TIE, TRLS_ROW, Row, ignore
from grpo_nb.rewards import Reward, RewardSet, Scored, call
from grpo_nb.rewards.prompts import Completion, completion_text, in_parts, transcript

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs.config import RunConfig

EPSILON = 1e-4  # added to standard deviations, as in TRL


class Conditions(NamedTuple):
    """Hold the arguments of GRPOConfig that decide what a reward gets and how scores are used."""

    max_completion_length: int = 512
    max_steps: int = 250
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    multi_objective_aggregation: str = "sum_then_normalize"


class Bench(NamedTuple):
    """Hold rewards, and the training conditions under which they score completions.

    preset: The rewards and their weights.
    grpo: Conditions, or an object with the same attributes: a GRPOConfig or a run's settings.
    tokenizer: The tokenizer for the `completion_ids` that TRL passes to rewards. If it is None,
        length rewards count words.
    unsloth_on_gpu: Whether Unsloth will train on a GPU, which changes the effect of `dr_grpo`.
    environment: The task's environment. Rewards get its instances as `environments`, each in its
        state after the tool calls of a completion.
    """

    preset: RewardSet
    grpo: Any = Conditions()
    tokenizer: "PreTrainedTokenizerBase | None" = None
    unsloth_on_gpu: bool = False
    environment: Environment | None = None

    def arguments(self, rows: Sequence[Row], completions: Sequence[Completion]) -> dict[str, Any]:
        """Return the keyword arguments with which TRL would call a reward.

        Every call to a reward outside training uses these arguments.

        Args:
            rows: One dataset row for each completion (repeated per generation).
            completions: Strings or message lists; as in training, rewards get messages if the
                prompt is a chat.
        """
        with hub.quiet():
            from transformers import TrainerState

        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in TRLS_ROW}
        columns["prompts"] = [in_parts(row["prompt"]) for row in rows]
        columns["completions"] = list(map(_as_in_training, columns["prompts"], completions))
        if self.tokenizer is not None:
            texts = [transcript(completion) for completion in completions]
            encoded = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
            cut, end = self.grpo.max_completion_length, self.tokenizer.eos_token_id
            columns["completion_ids"] = [ids if len(ids) >= cut else [*ids, end] for ids in encoded]
        if self.environment:
            columns["environments"] = [
                replay(self.environment, row, completion)
                for row, completion in zip(rows, columns["completions"], strict=True)
            ]
        # The state at the start of training, which an `Adaptive` reward does not count as a step.
        columns["trainer_state"] = TrainerState(epoch=0.0, max_steps=self.grpo.max_steps)
        columns["trainer_state"].is_training = False
        return columns | {"log_extra": ignore, "log_metric": ignore}

    def score(self, rows: Sequence[Row], completions: Sequence[Completion]) -> np.ndarray:
        """Return the raw scores, [completions, rewards], with NaN for None."""
        arguments = self.arguments(rows, completions)
        scores = [call(func, **arguments) for func in self.preset.reward_funcs]
        return np.array(scores, dtype=float).T

    def totals(self, scores: np.ndarray) -> np.ndarray:
        """Return the weighted total of each completion, [completions]."""
        return weighted_totals(scores, self.preset.reward_weights)

    def table(
        self, rows: Sequence[Row], completions_P_G: Sequence[Sequence[Completion]]
    ) -> pd.DataFrame:
        """Return the score table, one line per completion, group after group.

        Args:
            rows: Dataset rows, [prompts].
            completions_P_G: Completions, [prompts][group].

        Returns:
            The columns question, reference, completion, answer (as extracted), each reward and
            its `<reward>/reason`, correct, total, mean and std of the group, advantage, and signal
            (whether the advantages of the group differ at all).
        """
        group = len(completions_P_G[0])
        row_of_each = [row for row in rows for _ in range(group)]
        batch = [completion for completions in completions_P_G for completion in completions]
        arguments = self.arguments(row_of_each, batch)
        texts = [transcript(completion) for completion in batch]
        table = pd.DataFrame({"question": [row["question"] for row in row_of_each]})
        table["reference"] = [row["answer"] for row in row_of_each]
        table["completion"] = texts
        answers = [self.preset.form.extract(completion_text(completion)) for completion in batch]
        table["answer"] = pd.Series(answers, dtype=object)
        for func in self.preset.reward_funcs:
            results = explain(func, arguments)
            table[func.__name__] = np.array([each.score for each in results], dtype=float)
            table[f"{func.__name__}/reason"] = [each.reason for each in results]
        scores, grpo = table[self.preset.names].to_numpy(), self.grpo
        totals = self.totals(scores)
        groups = pd.Series(totals).groupby(np.arange(len(totals)) // group)
        advantage = advantages(
            scores,
            self.preset.reward_weights,
            group,
            effective_scaling(grpo.scale_rewards, grpo.loss_type, self.unsloth_on_gpu),
            grpo.multi_objective_aggregation,
        )
        has_signal = np.ptp(advantage.reshape(-1, group), axis=1) > TIE
        return table.assign(
            correct=passed(table, self.preset),
            total=totals,
            mean=groups.transform("mean").to_numpy(),
            std=groups.transform("std").to_numpy(),
            advantage=advantage,
            signal=np.repeat(has_signal, group),
        )


def bench_of(config: "RunConfig", preset: RewardSet, tokenizer: Any = None) -> Bench:
    """Return a bench with these rewards and the training conditions of a run."""
    return Bench(preset, config.grpo, tokenizer, cuda_available(), of(config))


def _as_in_training(prompt: Any, completion: Completion) -> Completion:
    """Convert a completion to the type of its prompt: text, or one assistant message."""
    if isinstance(prompt, str) or not isinstance(completion, str):
        return completion
    return [{"role": "assistant", "content": completion}]


def explain(func: Callable[..., Any], arguments: dict[str, Any]) -> list[Scored]:
    """Return each completion's score and reason; plain functions give no reasons.

    Raises:
        ValueError: The reward needs a column that the data lacks, or did not return one number or
            None for each completion.
    """
    if isinstance(func, Reward):
        return call(func.explain, **arguments)
    scores, count = call(func, **arguments), len(arguments["completions"])
    misfits = [each for each in scores if each is not None and not hasattr(each, "__float__")]
    if misfits or len(scores) != count:
        raise ValueError(
            f"reward {func.__name__} gave {len(scores)} scores for {count} completions, such as "
            f"{(misfits or scores)[:1]}: return one number or None for each"
        )
    return [Scored(score) for score in scores]


def passed(table: pd.DataFrame, preset: RewardSet) -> np.ndarray:
    """Return whether completions earn the reward for correctness in full, [completions]."""
    return np.isclose(table[preset.correct_func.__name__], preset.full)


# -- advantages


def weighted_totals(scores: np.ndarray, weights: Sequence[float]) -> np.ndarray:
    """Return the weighted sum of each completion's scores.

    Args:
        scores: Scores, [completions, rewards]; NaN where a reward returned None.
        weights: Weights, [rewards].

    Returns:
        Totals, [completions]. None counts as 0; the total is NaN if no reward gave a score.
    """
    totals = np.nan_to_num(scores * np.asarray(weights)).sum(axis=1)
    return np.where(np.isnan(scores).all(axis=1), np.nan, totals)


def effective_scaling(scale_rewards: str, loss_type: str, unsloth_on_gpu: bool) -> str:
    """Return the value of `scale_rewards` that takes effect.

    >>> effective_scaling("group", "dr_grpo", unsloth_on_gpu=True)
    'none'
    """
    return "none" if loss_type == "dr_grpo" and unsloth_on_gpu else scale_rewards


def advantages(
    scores: np.ndarray,
    weights: Sequence[float],
    num_generations: int,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> np.ndarray:
    """Return the advantage of each completion within its group.

    Args:
        scores: Scores, [completions, rewards], with the completions of a group in consecutive
            rows; NaN for None.
        weights: Weights, [rewards].
        num_generations: Group size.
        scale_rewards: Divide by the standard deviation (with Bessel's correction) of the "group"
            or the "batch", or by nothing ("none").
        multi_objective_aggregation: "sum_then_normalize", or "normalize_then_sum", which
            normalizes each reward within its group, then normalizes their weighted sum over the
            batch, and ignores `scale_rewards`.

    Returns:
        Advantages, [completions]; 0 where no reward gave a score.

    Raises:
        ValueError: The number of completions is not a multiple of the group size.

    Source: trl.GRPOTrainer; Shao et al. 2024, https://arxiv.org/abs/2402.03300; GDPO (for
        normalize_then_sum), https://huggingface.co/papers/2601.05242.

    >>> advantages(np.array([[1.0], [0.0], [1.0], [1.0]]), [1.0], 2).round(3).tolist()
    [0.707, -0.707, 0.0, 0.0]
    """
    if len(scores) % num_generations:
        raise ValueError(f"{len(scores)} completions do not make groups of {num_generations}")
    with warnings.catch_warnings(action="ignore"):  # numpy warns about groups without any score
        if multi_objective_aggregation == "normalize_then_sum":
            grouped = scores.reshape(-1, num_generations, scores.shape[1])
            each = np.nan_to_num(_centered(grouped, 1) / (_std(grouped, 1) + EPSILON))
            each = np.where(np.isnan(scores), np.nan, each.reshape(scores.shape))
            totals = weighted_totals(each, weights)
            return np.nan_to_num(_centered(totals, 0) / (_std(totals, 0) + EPSILON))
        totals = weighted_totals(scores, weights)
        groups = totals.reshape(-1, num_generations)
        spread = {"group": _std(groups, 1), "batch": _std(totals, 0)}.get(scale_rewards)
        scaled = _centered(groups, 1) / (1 if spread is None else spread + EPSILON)
        return np.nan_to_num(scaled).reshape(-1)


def _centered(values: np.ndarray, axis: int) -> np.ndarray:
    return values - np.nanmean(values, axis=axis, keepdims=True)


def _std(values: np.ndarray, axis: int) -> np.ndarray:
    return np.nanstd(values, axis=axis, ddof=1, keepdims=True)  # NaN for fewer than two values
