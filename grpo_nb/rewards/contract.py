"""Enforce the contract of a reward; `@reward` turns a function of one completion into a reward.

TRL calls a reward once per batch, with keyword arguments only: `prompts`, `completions`,
every dataset column (already repeated for each generation), and TRL's own `completion_ids`,
`trainer_state`, `log_extra`, `log_metric`. TRL expects one `float | None` per completion.

A missing column, or a column of the wrong length, raises an error at once. A score outside the
declared range, or an exception in the scorer, raises an error too; with on_error="skip" the score
is None instead. NaN and infinity are never returned: the score is None, and the metric
`<name>/skipped` counts it. If more than `max_none_share` of the scores of a batch are None, the
reward raises an error with the first reason.
"""

import functools
import inspect
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from grpo_nb.rewards.calls import contained
from grpo_nb.rewards.prompts import Completion, as_text, completion_text

Scores = list[float | None]
SMALL_BATCH = 20  # completions; max_none_share does not apply to smaller batches
TRLS_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


class Scored(NamedTuple):
    """Hold a score and a reason for people to read."""

    score: float | None
    reason: str = ""


class Reward:
    """Wrap a scorer as a reward in TRL's shape, as `@reward` does.

    A call returns one `float | None` per completion. `explain` returns the reasons too, and
    `configured` returns a copy with other options and another name. A reward keeps no state, so it
    may be called from several threads.
    """

    def __init__(self, score: Callable[..., Any], settings: "reward", **options: Any) -> None:
        self.score, self.settings, self.options = score, settings, options
        self.__name__ = self.__qualname__ = score.__name__
        self.__module__, self.__doc__ = score.__module__, score.__doc__
        self.range = (settings.low, settings.high)
        parameters = list(inspect.signature(score).parameters.values())[1:]
        columns = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
        self.columns = [p.name for p in columns if p.default is p.empty]
        self._optional = [p.name for p in columns if p.default is not p.empty]
        self.option_names = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]

    def configured(self, name: str = "", **options: Any) -> "Reward":
        """Return a copy of the reward with other options.

        Args:
            name: The copy's name in the metrics; by default the options are added to the name.
            options: The scorer's keyword-only parameters.

        Raises:
            ValueError: The scorer has no such option.
        """
        for option in options:
            if option not in self.option_names:
                names = ", ".join(self.option_names) or "none"
                raise ValueError(f"{self.__name__} has no option {option!r}; it has {names}")
        copy = type(self)(self.score, self.settings, **{**self.options, **options})
        suffix = "_".join(f"{key}_{value}" for key, value in options.items())
        copy.__name__ = name or f"{self.__name__}_{suffix}"
        return copy

    def __repr__(self) -> str:
        return f"<reward {self.__name__}>"

    def __call__(
        self, completions: Sequence[Completion], prompts: Sequence[Any] | None = None, **columns
    ) -> Scores:
        return self._finish(self.explain(completions, prompts, **columns), columns)

    def explain(
        self, completions: Sequence[Completion], prompts: Sequence[Any] | None = None, **columns
    ) -> list[Scored]:
        """Return each completion's score and reason; the arguments are those of `__call__`."""
        rows = self._rows(completions, prompts, columns)
        if not self.settings.parallel:
            return list(map(self._scored, rows))
        # If several processes train, each may use only its share of the cores.
        countable = hasattr(os, "sched_getaffinity")
        cores = len(os.sched_getaffinity(0)) if countable else os.cpu_count()
        with ThreadPoolExecutor(cores) as pool:
            return list(pool.map(self._scored, rows))

    def _rows(self, completions, prompts, columns) -> list[tuple[int, str, dict]]:
        """Check all columns, then return (number, response, {column: value}) per completion."""
        data = dict(columns)
        if prompts is not None and "prompt" in (*self.columns, *self._optional):
            data["prompt"] = list(map(as_text, prompts))
        if absent := [column for column in self.columns if column not in data]:
            raise ValueError(
                f"reward {self.__name__} needs the column {absent[0]!r}, but the dataset has "
                f"{sorted(k for k, v in data.items() if isinstance(v, list))}: add or rename it"
            )
        table: dict[str, Sequence[Any]] = {}
        for column in [c for c in self.columns + self._optional if c in data]:
            values = data[column]
            if column == "trainer_state" or values is None:
                values = [values] * len(completions)
            if len(values) != len(completions):
                raise ValueError(
                    f"reward {self.__name__}: column {column!r} has {len(values)} values for "
                    f"{len(completions)} completions; give one for each completion, not one for "
                    "each prompt"
                )
            table[column] = list(values)
        return [
            (row, completion_text(completion), {name: table[name][row] for name in table})
            for row, completion in enumerate(completions)
        ]

    def _scored(self, row: tuple) -> Scored:
        number, response, columns = row
        try:
            with contained(self.__name__):
                return self._checked(self.score(response, **columns, **self.options))
        except Exception as error:
            if self.settings.on_error == "skip":
                return Scored(None, f"{type(error).__name__}: {error}")
            error.add_note(f"in reward {self.__name__}, completion {number} of the batch")
            raise

    def _checked(self, value: Any) -> Scored:
        result = value if isinstance(value, Scored) else Scored(value)
        if result.score is None or not math.isfinite(result.score):
            return Scored(None, result.reason or f"the scorer gave {result.score}")
        low, high = self.range
        if not low <= result.score <= high:
            raise ValueError(
                f"reward {self.__name__} gave {result.score}, outside its declared range "
                f"[{low}, {high}]: correct it, or declare @reward(low=…, high=…)"
            )
        return Scored(float(result.score), result.reason)

    def _finish(self, results: list[Scored], columns: dict[str, Any]) -> Scores:
        reasons = [one.reason for one in results if one.score is None]
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/skipped", float(len(reasons)))
        if (log_extra := columns.get("log_extra")) and any(one.reason for one in results):
            log_extra(f"{self.__name__}/reason", [one.reason for one in results])
        limit = self.settings.max_none_share * len(results)
        if len(results) >= SMALL_BATCH and len(reasons) > limit:
            raise RuntimeError(
                f"reward {self.__name__} could not score {len(reasons)} of {len(results)} "
                f"completions, over max_none_share = {self.settings.max_none_share:g}: "
                f"{reasons[0]}. Correct the reward or the data, or raise max_none_share"
            )
        return [one.score for one in results]


@dataclass(frozen=True, kw_only=True)
class reward:
    """Turn `def score(response, <columns>, *, <options>)` into a reward that TRL can call.

    The scorer's first parameter is the completion's text; `prompt`, `completion_ids` and
    `trainer_state` come from TRL. The content of each message of `prompt` is text; in a task with
    images, `images` contains the images. Any other parameter is a column of the dataset, which is
    optional if the parameter has a default. Keyword-only parameters are options, which `configured`
    sets. The scorer returns a float, None, or `Scored(score, reason)`.

    Args:
        low: Lowest score that the scorer may give.
        high: Highest score that the scorer may give; weights belong in `reward_weights`.
        on_error: "raise" raises the scorer's errors; "skip" scores None instead.
        max_none_share: Highest accepted share of None (in batches of at least SMALL_BATCH).
        parallel: Whether to score a batch in threads, for a scorer that waits for another process.
        resists: The reward hacking that the reward resists, for the table of rewards.
        needs: The part that the form must have, "marks" or "reasoning". Reward sets in a form
            without this part leave the reward out.

    >>> @reward()
    ... def says(response: str, answer: str) -> float:
    ...     return float(answer in response)
    >>> says(prompts=["?", "?"], completions=["4", "5"], answer=["4", "4"])
    [1.0, 0.0]
    """

    low: float = 0.0
    high: float = 1.0
    on_error: Literal["raise", "skip"] = "raise"
    max_none_share: float = 1.0
    parallel: bool = False
    resists: str = ""
    needs: str = ""

    def __call__(self, score: Callable[..., Any]) -> Reward:
        return Reward(score, self)


def declared_range(reward_func: Callable[..., Any]) -> tuple[float, float]:
    """Return the lowest and the highest score that a reward declares; (0, 1) by default."""
    return getattr(reward_func, "range", (0.0, 1.0))


def parameters_of(reward_func: Callable[..., Any]) -> tuple[list[str], list[str], bool]:
    """Return a reward's required and optional arguments, and whether it takes any others.

    >>> parameters_of(lambda completions, answer, unit="", **columns: [0.0])
    (['completions', 'answer'], ['unit'], True)
    """
    if hasattr(reward_func, "columns"):
        return list(reward_func.columns), list(getattr(reward_func, "_optional", ())), True
    parameters = inspect.signature(reward_func).parameters.values()
    bound = getattr(reward_func, "keywords", {})  # of a partial
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    names = {p.name: p.default is p.empty for p in parameters if p.kind not in kinds}
    required = [name for name, needs in names.items() if needs and name not in bound]
    optional = [name for name, needs in names.items() if not needs and name not in bound]
    return required, optional, any(p.kind is p.VAR_KEYWORD for p in parameters)


def unwrapped(reward_func: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function inside a partial, or anything else as it is."""
    while isinstance(reward_func, functools.partial):
        reward_func = reward_func.func
    return reward_func


def columns_read(reward_func: Callable[..., Any], required: bool = False) -> list[str]:
    """Return the columns that a reward reads; with `required`, only those without a default."""
    names, optional, _ = parameters_of(reward_func)
    names += [] if required else optional
    return [name for name in names if name not in (*TRLS_OWN, "environments")]
