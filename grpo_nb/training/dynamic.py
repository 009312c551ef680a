"""Dynamic sampling: groups that teach nothing are drawn anew before the update.

Where all completions of a group earn the same, no advantage is left and its rows move nothing.
Such groups give their place to fresh prompts, up to a number of rounds.
Source: DAPO, Yu et al. 2025, https://arxiv.org/abs/2503.14476.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_nb.reward_lab.advantages import advantages
from grpo_nb.reward_lab.table import TIE
from grpo_nb.training import ranks

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]


class Draw(NamedTuple):
    """Scored completions, groups one after another.

    rows: Of the dataset, one for each completion.
    generated: What TRL's `_generate` gave: lists of that length, or nothing.
    scores_N_F: [completions, rewards], NaN for None.
    extra: Columns that rewards logged.
    """

    rows: list[Row]
    generated: tuple[Any, ...]
    scores_N_F: "torch.Tensor"
    extra: dict[str, list[Any]]

    def put(self, place: int, other: "Draw", group: int, size: int) -> None:
        """In place of one of these groups, one of the other's."""
        to, of = (slice(n * size, (n + 1) * size) for n in (place, group))
        columns = zip(self.generated, other.generated, strict=True)
        for ours, theirs in [(self.rows, other.rows), *columns]:
            if isinstance(ours, list) and ours:
                ours[to] = theirs[of]
        self.scores_N_F[to] = other.scores_N_F[of]
        for name in {**self.extra, **other.extra}:
            ours = self.extra.setdefault(name, [None] * len(self.rows))
            ours[to] = other.extra.get(name, [None] * len(other.rows))[of]


class DynamicSampling:
    """Of a GRPOTrainer: groups without signal are drawn anew, `dynamic_rounds` times at most.

    Metrics are of the first draw, so that `reward` or `completions/mean_length` say of the policy
    what they say without this; the replaced groups were chosen by their reward. The update and
    what is measured in it (loss, entropy, clip ratios), the advantages and the completions on
    disk are of the batch that is trained on. `num_tokens` and all seconds count every draw.
    """

    dynamic_rounds: int = 0
    _replayed: Draw | None = None

    def _generate_and_score_completions(self, inputs: Sequence[Row]) -> dict[str, Any]:
        if not (self.dynamic_rounds and self.model.training):
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        draw = self._draw(inputs)
        with self._no_log_probabilities():
            self._batch(draw)
        started = time.perf_counter()
        with self._metrics_of_the_first_draw():
            replaced, left = self._draw_anew(draw)
            batch = self._batch(draw)
        groups = len(draw.rows) // self.num_generations
        self._note("dynamic/replaced", replaced / groups)
        self._note("dynamic/without_signal", left / groups)
        self._note("dynamic/seconds", time.perf_counter() - started)
        return batch

    def _draw_anew(self, draw: Draw) -> tuple[int, int]:
        """(groups replaced, groups that stay without signal)."""
        dull, fresh = np.flatnonzero(~self._teaching(draw)), self._fresh(draw.rows)
        before, size = len(dull), self.num_generations
        for _ in range(self.dynamic_rounds):
            rows = [dict(row) for row in islice(fresh, len(dull)) for _ in range(size)]
            if not rows:  # nothing to replace, or by nothing
                break
            other = self._draw(rows)
            self._pending_metrics.clear()
            teaching = np.flatnonzero(self._teaching(other))
            for place, group in zip(dull, teaching, strict=False):
                draw.put(place, other, group, size)
            dull = dull[len(teaching) :]
        return before - len(dull), len(dull)

    def _teaching(self, draw: Draw) -> np.ndarray:
        """Whether the advantages of a group differ by more than rounding, [groups].

        Without scaling: TRL's would make 1e-3 of totals that are equal but for rounding.
        """
        gained_N = advantages(
            draw.scores_N_F.double().cpu().numpy(),
            self.reward_weights.tolist(),
            self.num_generations,
            "none",
            self.multi_objective_aggregation,
        )
        return np.ptp(gained_N.reshape(-1, self.num_generations), axis=1) > TIE

    def _fresh(self, used: Sequence[Row]) -> Iterator[Row]:
        """Training rows with other prompts, in an order that seed and step alone decide.

        The order in which the training goes through its rows stays as it is.
        """
        place = self._step % self.args.gradient_accumulation_steps
        order = random.Random(f"{self.args.seed} {self.state.global_step} {place}")
        taken = [row["prompt"] for row in used[:: self.num_generations]]
        most = len(taken) * (1 + self.dynamic_rounds)
        count = len(self.train_dataset)
        for number in order.sample(range(count), min(most, count)):
            row = self.train_dataset[number]
            if row["prompt"] not in taken:
                taken.append(row["prompt"])
                yield row

    def _draw(self, rows: Sequence[Row]) -> Draw:
        prompts = [row["prompt"] for row in rows]
        generated = super()._generate(prompts)  # type: ignore[misc]
        _, completion_ids, _, completions, *_ = generated
        scores_N_F = super()._calculate_rewards(rows, prompts, completions, completion_ids)  # type: ignore[misc]
        extra = {name: list(values) for name, values in self._pending_extra_logs.items()}
        self._pending_extra_logs.clear()
        return Draw(list(rows), generated, scores_N_F, extra)

    def _batch(self, draw: Draw) -> dict[str, Any]:
        """What TRL makes of a draw: tensors, advantages, metrics and the log of completions."""
        self._replayed = draw
        try:
            return super()._generate_and_score_completions(draw.rows)  # type: ignore[misc]
        finally:
            self._replayed = None

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._replayed:
            return self._replayed.generated
        return super()._generate(*args, **kwargs)  # type: ignore[misc]

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        if self._replayed:
            self._pending_extra_logs.update(self._replayed.extra)
            return self._replayed.scores_N_F
        return super()._calculate_rewards(*args, **kwargs)  # type: ignore[misc]

    @contextmanager
    def _no_log_probabilities(self) -> Iterator[None]:
        """Of the reference and of vLLM's samples: the rows to train on are not known yet."""
        kept = self.beta, self.vllm_importance_sampling_correction
        self.beta, self.vllm_importance_sampling_correction = 0.0, False
        try:
            yield
        finally:
            self.beta, self.vllm_importance_sampling_correction = kept

    @contextmanager
    def _metrics_of_the_first_draw(self) -> Iterator[None]:
        metrics = self._metrics["train"]
        before = {name: list(values) for name, values in metrics.items()}
        yield
        for name, values in before.items():
            if "seconds" in name:
                values[-1] += sum(metrics[name][len(values) :])
        metrics.update(before, num_tokens=metrics["num_tokens"])


def refuse_with_processes(rounds: int) -> None:
    """Raise ValueError where processes share a step: a group may lie on two of them."""
    if rounds and ranks.count() > 1:
        raise ValueError(
            f"train.dynamic_sampling = {rounds} works in one process, and there are "
            f"{ranks.count()}: --set train.dynamic_sampling=0"
        )
