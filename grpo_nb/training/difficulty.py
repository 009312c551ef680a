"""Draw the rows to train on by what the policy can do now: `difficulty(trainer)`.

A group whose completions all earn the same teaches nothing. TRL draws each row once an epoch; here,
a row is drawn more often if the rewards of its last group differed more. Rows that are always or
never solved are drawn rarely, but their weight is never 0. A row that was not drawn yet has the
mean weight of the drawn rows of its level. Rows may have levels: the rows of a level are drawn once
the levels below it are learnt.

The rows of one generation form a chunk, and chunk n is drawn by a random generator with the seed
(seed, n). transformers reads rows ahead of the step that uses them. Therefore a checkpoint's
trainer_state.json holds every chunk drawn so far, and what the last groups earned, so that a
training that resumes draws the same rows.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from transformers import TrainerCallback

from grpo_nb.names import refuse_unknown
from grpo_nb.rewards import declared_range
from grpo_nb.training import stock

if TYPE_CHECKING:
    import torch

RARELY = 0.2  # weight of a row whose completions all earn the same; the largest weight is 1.2
LEARNT = 0.7  # pass rate of a level above which the next one is drawn
LEAST = 8  # rows of a level to be drawn before its pass rate counts
STATE = "difficulty"  # the entry of trainer_state.json


def difficulty(trainer: Any, correct: str = "") -> None:
    """Let a trainer draw the rows that still teach, from the next `trainer.train()` on.

    Each prompt is repeated as in TRL's own sampler. If the rows have a column `level`, such as
    1, 2, … or "gcd 1", "gcd 2", …, the rows of a level are drawn once the pass rate of every level
    below it is above 0.7.

    Args:
        trainer: The trainer, TRL's or Unsloth's, before `train()`.
        correct: The reward whose mean, rescaled to its range, is the pass rate of a level; by
            default the total, rescaled to the lowest and highest total seen.

    Raises:
        ValueError: `correct` is none of the trainer's rewards, the dataset is a stream,
            `ignore_data_skip` is set, a level has no number, or too few rows can be drawn.
    """
    draws = Difficulty(trainer, correct)
    if not isinstance(trainer, DrawsRows):
        trainer.__class__ = type(type(trainer).__name__, (DrawsRows, type(trainer)), {})
    trainer.difficulty = draws
    stock.add_callback(trainer, draws, first=True)


class DrawsRows:
    """Make a trainer take its rows from `trainer.difficulty`.

    The function `difficulty` puts this class before the trainer's own in the order of inheritance.
    """

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> "Difficulty":
        super()._get_train_sampler(*args, **kwargs)  # a run's trainer keeps TRL's sampler
        return self.difficulty

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> "torch.Tensor":
        """Note what the groups earn; TRL gathers the scores in the order of the chunk's rows."""
        rewards_N_F = super()._calculate_rewards(*args, **kwargs)
        if self.model.training:
            self.difficulty.note(rewards_N_F)
        return rewards_N_F


class Difficulty(TrainerCallback):
    """Draw rows, repeat them as TRL's RepeatSampler does, and note what they earn.

    Attributes:
        chunks: The rows drawn so far, one list for each chunk: the prompts sampled at a time.
        groups: {row: (mean score, variance of the total)}, from the row's last group.
        ends: The lowest and the highest score, declared by `correct` or seen so far.
    """

    def __init__(self, trainer: Any, correct: str) -> None:
        self.trainer, self.correct = trainer, correct
        if correct:
            refuse_unknown("reward", correct, list(trainer.reward_func_names))
        if not hasattr(trainer.train_dataset, "__len__"):
            raise ValueError("rows are drawn by number, and this is a stream: give a Dataset")
        if trainer.args.ignore_data_skip:
            raise ValueError("ignore_data_skip = True would lose count of the rows: leave it out")
        self.form = trainer._get_train_sampler()  # TRL's
        self.form = getattr(self.form, "form", self.form)  # a cell that runs twice
        self.levels = _levels(trainer.train_dataset)
        self.begin({})
        first = self.weights() > 0
        if first.sum() < self.form.batch_size:
            raise ValueError(
                f"{first.sum()} rows{' of the first level' * (not first.all())} are fewer than "
                f"the {self.form.batch_size} prompts that are sampled at a time: give more rows"
            )

    def begin(self, state: dict[str, Any]) -> dict[str, Any]:
        """Begin from a saved state, or from {}; return the state that is updated from now on."""
        funcs = dict(zip(self.trainer.reward_func_names, self.trainer.reward_funcs, strict=True))
        ends = declared_range(funcs[self.correct]) if self.correct else ()
        self.chunks: list[list[int]] = state.get("chunks", [])
        self.groups = {int(row): group for row, group in state.get("groups", {}).items()}
        self.ends: list[float] = state.get("ends", list(ends))
        self.first = self.place = 0  # chunk at which the epoch begins; chunk to be scored next
        return {"chunks": self.chunks, "groups": self.groups, "ends": self.ends}

    def __len__(self) -> int:
        return len(self.form)

    def __iter__(self) -> Iterator[int]:
        """Yield the rows of an epoch."""
        for number in range(self.first, self.first + self._per_epoch):
            while len(self.chunks) <= number:
                weights = self.weights()
                draw = np.random.default_rng([self.trainer.args.seed, len(self.chunks)])
                options = {"replace": False, "p": weights / weights.sum()}
                chunk = draw.choice(len(weights), self.form.batch_size, **options)
                self.chunks.append(chunk.tolist())
            rows = np.repeat(self.chunks[number], self.form.mini_repeat_count).tolist()
            for _ in range(self.form.repeat_count):
                yield from rows

    def weights(self) -> np.ndarray:
        """Return the weight of each row, which is 0 for rows of a level that is not drawn yet."""
        variance = self._of_rows("variance")
        most = variance.max()
        weights = variance / (most if most > 0 else 1.0) + RARELY
        neutral = weights.groupby([self.levels["task"], self.levels["number"]]).transform("mean")
        is_open = self._open().reindex(pd.MultiIndex.from_frame(self.levels))
        return weights.fillna(neutral).fillna(1.0).to_numpy() * is_open.to_numpy()

    def _of_rows(self, what: str) -> pd.Series:
        """Return the mean or the variance of each row's last group; NaN if a row has no group."""
        table = pd.DataFrame.from_dict(self.groups, orient="index", columns=["mean", "variance"])
        return table[what].astype(float).reindex(self.levels.index)

    def _open(self) -> pd.Series:
        """Return, for each task and level, whether its rows are drawn.

        They are drawn if all levels below are learnt.
        """
        low, high = self.ends or (0.0, 1.0)
        rates = (self._of_rows("mean") - low) / (high - low or 1.0)
        rates = rates.groupby([self.levels["task"], self.levels["number"]])
        learnt = (rates.count() >= rates.size().clip(upper=LEAST)) & (rates.mean() > LEARNT)
        below = learnt.astype(int).groupby("task").shift(fill_value=1)
        return below.groupby("task").cumprod() > 0

    def note(self, rewards_N_F: "torch.Tensor") -> None:
        """Record what the groups of a chunk earned, and log the highest level that is drawn."""
        trainer, scores = self.trainer, pd.DataFrame(rewards_N_F.double().cpu().numpy())
        scores.columns = trainer.reward_func_names
        totals = scores.mul(trainer.reward_weights.tolist()).sum(axis=1, min_count=1)
        decisive = scores[self.correct] if self.correct else totals
        ends = [*self.ends, *decisive.dropna().tolist()]
        self.ends[:] = [min(ends), max(ends)] if ends else []
        rows = np.repeat(self.chunks[self.place], trainer.num_generations)
        means, variances = decisive.groupby(rows).mean(), totals.groupby(rows).var(ddof=0).round(9)
        groups = pd.DataFrame({"mean": means, "variance": variances}).dropna()
        self.groups |= {int(row): [*group] for row, *group in groups.itertuples()}
        self.place += 1
        if self.levels["number"].nunique() > 1:
            levels = self._open()[lambda is_open: is_open].reset_index().groupby("task")
            level = float(levels["number"].max().mean())
            trainer._metrics["train"]["difficulty/level"].append(level)

    @property
    def _per_epoch(self) -> int:
        return self.form.num_samples // self.form.batch_size  # chunks

    def _place(self, step: int) -> tuple[int, int]:
        """Return the chunk at which a step's epoch begins, and the chunk that the step uses."""
        every, repeats = self.trainer.args.gradient_accumulation_steps, self.form.repeat_count
        epoch, step = divmod(step, max(1, math.ceil(self._per_epoch * repeats / every)))
        return epoch * self._per_epoch, epoch * self._per_epoch + step * every // repeats

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin anew, or continue from a checkpoint; transformers saves the state in each one."""
        state.stateful_callbacks[STATE] = self.begin(state.stateful_callbacks.get(STATE) or {})

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the chunk at which the epoch begins."""
        self.first = self._place(state.global_step)[0]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the chunk that is scored next."""
        self.place = self._place(state.global_step)[1]


def _levels(dataset: Any) -> pd.DataFrame:
    """Return the task and the number of each row's level: `gcd 2` is level 2 of the task gcd."""
    texts = dataset["level"] if "level" in dataset.column_names else [1] * len(dataset)
    table = pd.DataFrame([str(text).rpartition(" ")[::2] for text in texts])
    table.columns = ["task", "number"]
    numbers = pd.to_numeric(table["number"], errors="coerce")
    if numbers.isna().any():
        text = texts[int(numbers.isna().argmax())]
        raise ValueError(f"level = {text!r}: write a number, or a name and a number, as in 'gcd 2'")
    return table.assign(number=numbers.astype(float))
