"""Rewards made of rewards: gated, weighted, clipped, ensembles, and weights that move.

Parts may be any TRL-shaped functions; a combination is async if one of its parts is.
"""

import asyncio
import inspect
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_nb.rewards.contract import Reward, Scores, declared_range

BatchReward = Callable[..., Any]
Column = list[float | None]


def is_async(reward: BatchReward) -> bool:
    """Whether TRL has to await it: an async function, or an object with an async call."""
    call = getattr(reward, "__call__", None)  # noqa: B004 (its kind is asked, not its presence)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


def waits(reward: BatchReward) -> bool:
    """Whether its time passes in other processes, and it may run in a thread meanwhile.

    `@reward(parallel=True)` says both; a function from elsewhere may count on its turn.
    """
    if is_async(reward):
        return False
    parts = reward.parts if isinstance(reward, Combined) else [reward]
    ours = all(isinstance(part, Reward) for part in parts)
    return ours and any(part.settings.parallel for part in parts)


def in_thread(reward: BatchReward) -> BatchReward:
    """The reward as an async one: TRL runs those together, and the others one after another."""

    async def call(**columns: Any) -> Any:
        return await asyncio.to_thread(reward, **columns)

    call.__name__ = reward.__name__
    return call


class Combined:
    """Parts, and the function that makes one score of a completion's scores.

    `join(scores, **options)` takes one score a part; a None among them makes None.
    """

    def __init__(
        self,
        name: str,
        parts: Sequence[BatchReward],
        join: Callable[..., float],
        score_range: tuple[float, float],
        **options: Any,
    ) -> None:
        self.__name__, self.range = name, score_range
        self.parts, self.join, self.options = list(parts), join, options
        self.columns = sorted({c for part in parts for c in getattr(part, "columns", ())})
        self.__doc__ = f"{join.__doc__ or name} Of: {', '.join(p.__name__ for p in parts)}."

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        return self._join([part(completions=completions, **columns) for part in self.parts])

    def _join(self, columns_F_N: list[Column]) -> Scores:
        rows = zip(*columns_F_N, strict=True)
        return [None if None in row else self.join(row, **self.options) for row in rows]

    def __repr__(self) -> str:
        return f"<reward {self.__name__} of {self.parts}>"


class AsyncCombined(Combined):
    async def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        async def run(part: BatchReward) -> Column:
            ready = in_thread(part) if waits(part) else part
            scores = ready(completions=completions, **columns)
            return await scores if inspect.isawaitable(scores) else scores

        return self._join(list(await asyncio.gather(*map(run, self.parts))))


def combined(
    name: str,
    parts: Sequence[BatchReward],
    join: Callable[..., float],
    score_range: tuple[float, float],
    **options: Any,
) -> Combined:
    """A `Combined`, or an `AsyncCombined` if a part has to be awaited."""
    kind = AsyncCombined if any(map(is_async, parts)) else Combined
    return kind(name, parts, join, score_range, **options)


def _gate(row: Sequence[float], low: float, mark: float) -> float:
    """The first part, where the gate reaches its mark; else the least score."""
    return row[0] if row[1] >= mark else low


def gated(reward: BatchReward, *, by: BatchReward, mark: float = 1.0, name: str = "") -> Combined:
    """`reward` where `by` scores at least `mark`, else the least score of `reward`.

    Unlike a sum, it pays nothing for a right answer in the wrong format, or the reverse.
    """
    low, high = declared_range(reward)
    name = name or f"{reward.__name__}_gated_by_{by.__name__}"
    return combined(name, [reward, by], _gate, (low, high), low=low, mark=mark)


def _weigh(row: Sequence[float], weights: Sequence[float]) -> float:
    """Weighted sum."""
    return sum(score * weight for score, weight in zip(row, weights, strict=True))


def weighted(parts: Sequence[tuple[BatchReward, float]], *, name: str = "weighted") -> Combined:
    """One reward that is the weighted sum of others."""
    weights = [weight for _, weight in parts]
    ends = [sorted((low * w, high * w)) for (p, w) in parts for low, high in [declared_range(p)]]
    score_range = (sum(low for low, _ in ends), sum(high for _, high in ends))
    return combined(name, [part for part, _ in parts], _weigh, score_range, weights=weights)


def _clip(row: Sequence[float], low: float, high: float) -> float:
    """The score, kept between two ends."""
    return min(high, max(low, row[0]))


def clipped(reward: BatchReward, low: float, high: float, *, name: str = "") -> Combined:
    """`reward`, kept between `low` and `high`."""
    name = name or f"{reward.__name__}_clipped"
    return combined(name, [reward], _clip, (low, high), low=low, high=high)


def _pool(row: Sequence[float], how: str) -> float:
    """Pooled scores."""
    return float({"mean": statistics.fmean, "median": statistics.median, "min": min}[how](row))


def ensemble(parts: Sequence[BatchReward], how: str = "mean", *, name: str = "") -> Combined:
    """Several noisy rewards, such as judges, pooled by "mean", "median" or "min"."""
    if how not in ("mean", "median", "min"):
        raise ValueError(f"ensemble {how!r}: take 'mean', 'median' or 'min'")
    ends = [declared_range(part) for part in parts]
    score_range = (min(low for low, _ in ends), max(high for _, high in ends))
    return combined(name or f"{how}_of_{len(parts)}", parts, _pool, score_range, how=how)


class Scaled:
    """A reward times a factor that moves with the step; the base of the two below."""

    def __init__(self, reward: BatchReward, greatest: float) -> None:
        if is_async(reward):
            raise ValueError(f"{reward.__name__} is async: give it a fixed reward_weights entry")
        self.reward, self.__name__ = reward, reward.__name__
        self.__doc__, self.columns = reward.__doc__, getattr(reward, "columns", [])
        low, high = declared_range(reward)
        self.range = (min(0.0, low * greatest), max(0.0, high * greatest))

    def __call__(self, completions: Sequence[Any], trainer_state: Any = None, **columns) -> Scores:
        if trainer_state is not None:
            columns["trainer_state"] = trainer_state
        scores = self.reward(completions=completions, **columns)
        # Outside a training, as in a validation, no step is counted and no factor moves. Nor could
        # it where several processes train, of which only the first validates.
        training = getattr(trainer_state, "is_training", True)
        step = getattr(trainer_state, "global_step", -1) if training else -1
        factor = self.factor(step, scores)
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/factor", factor)
        return [None if score is None else score * factor for score in scores]


class Scheduled(Scaled):
    """A reward whose factor is drawn through points: {0: 0.2, 100: 1.0} rises for 100 steps."""

    def __init__(self, reward: BatchReward, points: dict[int, float]) -> None:
        if not points:
            raise ValueError("a schedule needs at least one point, such as {0: 1.0}")
        self.points = dict(sorted(points.items()))
        super().__init__(reward, max(points.values()))

    def factor(self, step: int, scores: Scores) -> float:
        steps = list(self.points)
        before = max((s for s in steps if s <= step), default=steps[0])
        after = min((s for s in steps if s >= step), default=steps[-1])
        share = (step - before) / (after - before) if after > before else 0.0
        return self.points[before] + share * (self.points[after] - self.points[before])


class Adaptive(Scaled):
    """A reward whose factor rises while it is seldom earned, and falls once it mostly is.

    Args:
        reward: The reward.
        low: Success rate under which the factor grows; success is a score at or above
            the middle of the reward's range.
        high: Success rate over which it shrinks.
        change: By how much a step multiplies or divides it.
        least: Its lower bound.
        greatest: Its upper bound.

    The factor moves once a step, however often the reward is called in it, and
    `save`/`load` keep it with a checkpoint.
    """

    def __init__(
        self,
        reward: BatchReward,
        low: float = 0.2,
        high: float = 0.8,
        change: float = 1.05,
        least: float = 0.25,
        greatest: float = 4.0,
    ) -> None:
        super().__init__(reward, greatest)
        self.low, self.high, self.change = low, high, change
        self.least, self.greatest = least, greatest
        self.value, self.step = 1.0, -1
        self.everyones: Callable[[list[float]], list[float]] = list  # of all processes' scores

    def factor(self, step: int, scores: Scores) -> float:
        middle = sum(declared_range(self.reward)) / 2
        if step <= self.step:
            return self.value
        if known := self.everyones([score for score in scores if score is not None]):
            self.step = step
            rate = sum(score >= middle for score in known) / len(known)
            power = (rate < self.low) - (rate > self.high)
            self.value = min(self.greatest, max(self.least, self.value * self.change**power))
        return self.value

    def save(self, folder: Path) -> None:
        state = {"value": self.value, "step": self.step}
        (folder / f"{self.__name__}.json").write_text(json.dumps(state), encoding="utf-8")

    def load(self, folder: Path) -> None:
        state = json.loads((folder / f"{self.__name__}.json").read_text(encoding="utf-8"))
        self.value, self.step = state["value"], state["step"]


def keep_adaptive_weights(rewards: Sequence[BatchReward]) -> Any:
    """A TrainerCallback that saves adaptive rewards with each checkpoint and restores them."""
    from transformers import TrainerCallback

    adaptive = [reward for reward in rewards if isinstance(reward, Adaptive)]

    class Keep(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            for reward in adaptive:
                reward.save(Path(args.output_dir) / f"checkpoint-{state.global_step}")

        def on_train_begin(self, args, state, control, **kwargs):
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            for reward in adaptive if state.global_step else ():
                reward.load(folder)

    return Keep()
