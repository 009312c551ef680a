"""The contract of a reward, and `@reward`, which lifts a one-completion scorer to it.

TRL calls a reward with keywords only, once a batch: `prompts`, `completions`, every
dataset column (already repeated per generation), and its own `completion_ids`,
`trainer_state`, `log_extra`, `log_metric`. It wants one `float | None` a completion.

Failures: a missing column or one of another length raises at once; so does a score out
of the declared range, and any exception of the scorer (unless on_error="skip"). NaN and
infinity are never returned: the score is None, and the metric `<name>/skipped` counts it.
"""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from grpo_nb.prompts import Completion, completion_text

Scorer = Callable[..., float | None]
BatchReward = Callable[..., list[float | None]]


class Preset(NamedTuple):
    """Rewards and their weights, as TRL's `reward_funcs` and `reward_weights` take them."""

    reward_funcs: list[BatchReward]
    reward_weights: list[float]

    @property
    def names(self) -> list[str]:
        return [func.__name__ for func in self.reward_funcs]


def reward(
    *,
    low: float = 0.0,
    high: float = 1.0,
    on_error: Literal["raise", "skip"] = "raise",
) -> Callable[[Scorer], BatchReward]:
    """Lift `def score(response, <columns>) -> float | None` to TRL's batch contract.

    Args:
        low: Least score the scorer may give.
        high: Greatest score it may give; a weight belongs into `reward_weights`.
        on_error: What an exception of the scorer does: raise, or None for that row.

    Returns:
        A decorator. The reward keeps the scorer's name and pickles by it; `.score` is the
        scorer itself, `.range` is `(low, high)`, `.columns` what it reads of the dataset.

    >>> @reward()
    ... def says(response: str, answer: str) -> float:
    ...     return float(answer in response)
    >>> says(prompts=["?", "?"], completions=["4", "5"], answer=["4", "4"])
    [1.0, 0.0]
    """

    def lift(score: Scorer) -> BatchReward:
        required, optional = _columns(score)

        def batch(
            completions: Sequence[Completion], prompts: Sequence[Any] | None = None, **batch_columns
        ) -> list[float | None]:
            columns = _pick(batch.__name__, required, optional, batch_columns, len(completions))
            scores = []
            for row, completion in enumerate(completions):
                arguments = {name: values[row] for name, values in columns.items()}
                try:
                    value = score(completion_text(completion), **arguments)
                except Exception as error:
                    if on_error == "raise":
                        error.add_note(f"in reward {batch.__name__}, completion {row} of the batch")
                        raise
                    value = None
                scores.append(_checked(batch.__name__, value, low, high))
            if log_metric := batch_columns.get("log_metric"):
                log_metric(f"{batch.__name__}/skipped", float(scores.count(None)))
            return scores

        functools.update_wrapper(batch, score)
        del batch.__wrapped__  # its signature is the batch's, not the scorer's
        batch.score, batch.range, batch.columns = score, (low, high), required
        return batch

    return lift


def _columns(score: Scorer) -> tuple[list[str], list[str]]:
    """(required, optional) dataset columns: the scorer's parameters after the response."""
    parameters = list(inspect.signature(score).parameters.values())[1:]
    required = [p.name for p in parameters if p.default is p.empty]
    return required, [p.name for p in parameters if p.default is not p.empty]


def _pick(
    name: str, required: list[str], optional: list[str], given: dict[str, Any], rows: int
) -> dict[str, Sequence[Any]]:
    missing = [column for column in required if column not in given]
    if missing:
        raise ValueError(
            f"reward {name} needs the column {missing[0]!r}, and the dataset has "
            f"{sorted(k for k, v in given.items() if isinstance(v, list))}: add or rename it"
        )
    columns = {column: given[column] for column in required + optional if column in given}
    for column, values in columns.items():
        if len(values) != rows:
            raise ValueError(
                f"reward {name}: column {column!r} has {len(values)} values for {rows} "
                "completions; give one for each completion, not one for each prompt"
            )
    return columns


def _checked(name: str, value: float | None, low: float, high: float) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    if not low <= value <= high:
        raise ValueError(
            f"reward {name} gave {value}, outside its declared range [{low}, {high}]: correct "
            "the score, or declare the range with @reward(low=…, high=…)"
        )
    return float(value)
