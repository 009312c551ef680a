"""Combine rewards in TRL's shape, build sets of them, and load the named sets of presets.yaml."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.answers import FORMS, TAGS, Form, find_form
from grpo_nb.files import read_yaml
from grpo_nb.rewards import gym, library
from grpo_nb.rewards.calls import call
from grpo_nb.rewards.contract import Reward, Scores, columns_read, declared_range, unwrapped

WORDS = "I think about it. "  # no equation, no connective, no answer
ANSWERS = ("so it is", '{"a": 1}')  # two forms of answers, neither of which is right
BatchReward = Callable[..., Any]


def is_async(reward: BatchReward) -> bool:
    """Return whether TRL must await a reward, because it or its `__call__` is an async function."""
    call = getattr(reward, "__call__", None)  # noqa: B004 (its kind matters, not its presence)
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(call)


@dataclass(eq=False)
class gated:
    """Pay the score of `reward` if `by` scores at least `mark`, else the lowest one of its range.

    Unlike a sum, a gate pays nothing extra for a right answer in the wrong format, or for a wrong
    answer in the right format. If either reward gives None, so does the gate.

    Raises:
        ValueError: One of the two rewards is async.
    """

    reward: BatchReward
    _: KW_ONLY
    by: BatchReward
    mark: float = 1.0
    name: str = ""  # the gate's `__name__`; by default it is built from both names

    def __post_init__(self) -> None:
        self.parts = [self.reward, self.by]
        names = [part.__name__ for part in self.parts]
        if any(map(is_async, self.parts)):
            raise ValueError("gated() takes no async reward: write one that awaits both parts")
        self.__name__ = self.name or "_gated_by_".join(names)
        self.__doc__ = f"{names[0]} where {names[1]} gives {self.mark:g}."
        self.range = declared_range(self.reward)
        self.columns = sorted({c for part in self.parts for c in getattr(part, "columns", ())})

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Scores:
        scores, gates = (part(completions=completions, **columns) for part in self.parts)
        return [
            None if score is None or gate is None else score if gate >= self.mark else self.range[0]
            for score, gate in zip(scores, gates, strict=True)
        ]


@dataclass(eq=False)
class Adaptive:
    """Multiply a reward by a factor that rises if successes are rare and falls if they are common.

    A success is a score at or above the middle of the reward's range. The factor changes at most
    once per step, however often the reward is called. Checkpoints hold `value` and `step`.
    """

    reward: BatchReward
    low: float = 0.2  # success rate below which the factor rises
    high: float = 0.8  # success rate above which the factor falls
    change: float = 1.05  # a step multiplies or divides the factor by this
    least: float = 0.25  # lower bound of the factor
    greatest: float = 4.0  # upper bound of the factor

    def __post_init__(self) -> None:
        name, (low, high) = self.reward.__name__, declared_range(self.reward)
        if is_async(self.reward):
            raise ValueError(f"Adaptive cannot wrap {name}, which is async: give it a fixed weight")
        self.__name__, self.__doc__ = name, self.reward.__doc__
        self.columns = getattr(self.reward, "columns", [])
        self.range = (min(0.0, low * self.greatest), max(0.0, high * self.greatest))
        self.value, self.step = 1.0, -1
        self.gather_scores: Callable[[list[float]], list[float]] = list  # the trainer replaces it

    def __call__(self, completions: Sequence[Any], trainer_state: Any = None, **columns) -> Scores:
        if trainer_state is not None:
            columns["trainer_state"] = trainer_state
        scores = self.reward(completions=completions, **columns)
        # Outside training, no step is counted and the factor does not change. It must not change
        # during validation, because only the first of several processes validates.
        if getattr(trainer_state, "is_training", True):
            self._move(getattr(trainer_state, "global_step", -1), scores)
        if log_metric := columns.get("log_metric"):
            log_metric(f"{self.__name__}/factor", self.value)
        return [None if score is None else score * self.value for score in scores]

    def _move(self, step: int, scores: Scores) -> None:
        middle = sum(declared_range(self.reward)) / 2
        if step <= self.step:
            return
        if numbers := self.gather_scores([score for score in scores if score is not None]):
            self.step = step
            rate = sum(score >= middle for score in numbers) / len(numbers)
            power = (rate < self.low) - (rate > self.high)
            self.value = min(self.greatest, max(self.least, self.value * self.change**power))


class RewardSet(NamedTuple):
    """Hold rewards, their weights (as in TRL's `reward_weights`), and a form of completions.

    reward_funcs: The rewards, in the order in which they were given.
    reward_weights: One weight for each reward.
    form: How completions are written. `form.extract(text)` returns the answer in a completion.
    result: A sentence on what an answer must be. `in_form` adds it to the system prompt of
        another form.
    own_reference: The function `reference` of a file, which replaces that of the form.
    correct: The name of the reward that decides what is correct; "" means the first.
    """

    reward_funcs: list[Callable[..., Any]]
    reward_weights: list[float]
    form: Form = TAGS
    result: str = ""
    own_reference: Callable[[Mapping[str, Any]], str] | None = None
    correct: str = ""

    def reference(self, row: Mapping[str, Any]) -> str:
        """Return the row's reference completion, which must earn `correct_func` in full."""
        return (self.own_reference or self.form.reference)(row)

    def in_form(self, name: str = "", opened: str = "") -> "RewardSet":
        """Return the set in another form, without rewards that need a part which the form lacks.

        Rewards that were configured with a form of their own keep it. Plain functions stay as they
        are.

        Args:
            name: A value of `rewards.form`; "" keeps the form.
            opened: The tag that the chat template opens at a prompt's end, such as "<think>\\n".
        """
        form = self.form
        if name and name != form.name:
            form = find_form(name)
            system_prompt = f"{form.system_prompt} {self.result}".strip()
            form = form._replace(system_prompt=system_prompt)
        form = form._replace(opened=opened)
        pairs = [
            (_in_form(func, self.form, form), weight)
            for func, weight in self.pairs
            if not isinstance(func, Reward) or form.has(func.settings.needs)
        ]
        return reward_set(pairs, self._replace(form=form))

    def adding(self, func: Callable[..., Any], weight: float) -> "RewardSet":
        """Return this set with one more reward."""
        return reward_set([*self.pairs, (func, weight)], self)

    @property
    def pairs(self) -> list[tuple[Callable[..., Any], float]]:
        """Return (reward, weight) of each reward."""
        return list(zip(self.reward_funcs, self.reward_weights, strict=True))

    @property
    def names(self) -> list[str]:
        """Return the names of the rewards, as TRL logs them."""
        return [func.__name__ for func in self.reward_funcs]

    @property
    def full(self) -> float:
        """Return the highest score of the reward that decides what is correct."""
        return declared_range(self.correct_func)[1]

    @property
    def correct_func(self) -> Callable[..., Any]:
        """Return the reward that decides what is correct."""
        names = self.names
        return self.reward_funcs[names.index(self.correct) if self.correct in names else 0]

    @property
    def format_name(self) -> str:
        """Return the name of the first format reward, reported as "well-formed"; "" if none.

        A format reward pays for the form alone: it reads no column, and pays more for words in the
        form than for any number of words without the form. If no reward does so with an answer in
        plain words, an answer in JSON is tried. Async rewards, such as judges, are not tried.
        """
        texts = [self.form.write(WORDS, answer) for answer in ANSWERS]
        pairs = ((func, text) for text in texts for func in self.reward_funcs)
        return next((func.__name__ for func, text in pairs if _pays_form(func, text)), "")


def _pays_form(func: Callable[..., Any], text: str) -> bool:
    """Return whether a reward that reads no column pays more for this text than for plain words."""
    func = func.reward if isinstance(func, Adaptive) else func
    texts = [text, "", WORDS, (WORDS * 20)[: len(text)], WORDS * 20]
    try:
        if is_async(func) or columns_read(func):
            return False
        prompts = [[{"role": "user", "content": "?"}] for _ in texts]
        completions = [[{"role": "assistant", "content": each}] for each in texts]
        score, *others = call(func, prompts=prompts, completions=completions)
        return score > max(others)
    except Exception:  # a user's reward may raise anything, such as for a column that it looks up
        return False


def _in_form(func: Callable[..., Any], before: Form, form: Form) -> Callable[..., Any]:
    """Return a reward, or a combination of rewards, with `form` in place of `before`."""
    if isinstance(func, gated | Adaptive):
        parts = {name: getattr(func, name) for name in ("reward", "by") if hasattr(func, name)}
        new_parts = {name: _in_form(part, before, form) for name, part in parts.items()}
        return func if new_parts == parts else replace(func, **new_parts)
    if not isinstance(func, Reward) or "form" not in func.option_names:
        return func
    present = func.options.get("form", TAGS)
    if form == present or present not in (before, TAGS):
        return func
    return func.configured(func.__name__, form=form)


def give_name(func: Callable[..., Any], name: str = "") -> None:
    """Name an unnamed reward after its partial's function, or else `name`, or else its class."""
    inner = unwrapped(func)
    if not hasattr(func, "__name__"):
        func.__name__ = getattr(inner, "__name__", name or type(inner).__name__)


def reward_set(
    pairs: Sequence[tuple[Callable[..., Any], float]], like: RewardSet | None = None, **about: Any
) -> RewardSet:
    """Return a set of `(reward, weight)` pairs; other fields are from `about`, or else from `like`.

    Rewards with an option `form` use the form of the set unless they were configured with another.

    Raises:
        ValueError: Two rewards have the same name, so that TRL's tables would merge them.
    """
    for func, _ in pairs:
        give_name(func)
    names = [func.__name__ for func, _ in pairs]
    if twins := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two rewards are named {twins[0]!r}: rename one (a built-in by .configured(name=…))"
        )
    like = (like or RewardSet([], []))._replace(**about)
    funcs = [_in_form(func, TAGS, like.form) for func, _ in pairs]
    return like._replace(reward_funcs=funcs, reward_weights=[float(weight) for _, weight in pairs])


def built_in() -> dict[str, Callable[..., Any]]:
    """Return {name: reward} for the rewards of this package that need no arguments."""
    pairs = (vars(library) | vars(gym)).items()
    return {name: func for name, func in pairs if isinstance(func, Reward)}


def _preset(
    rewards: Mapping[str, Any], form: str = "tags", system_prompt: str = "", result: str = ""
) -> RewardSet:
    """Return the reward set that an entry of presets.yaml describes."""
    pairs, ours, base = [], built_in(), find_form(form)
    for name, weight in rewards.items():
        options = weight if isinstance(weight, dict) else {"reward": name, "weight": weight}
        func, weight = ours[options.pop("reward")], options.pop("weight")
        pairs.append((func.configured(name, **options) if options else func, weight))
    base = base._replace(system_prompt=system_prompt or base.system_prompt)
    return reward_set(pairs, form=base, result=result)


PRESETS = {
    name: _preset(**about)
    for name, about in read_yaml(Path(__file__).with_name("presets.yaml")).items()
}

# Further names, known from guides to GRPO. The weights of a list are `PRESETS[…].reward_weights`.
MATH_REASONING_REWARDS = list(PRESETS["math"].reward_funcs)
CODE_GENERATION_REWARDS = list(PRESETS["code"].reward_funcs)
SUMMARIZATION_REWARDS = list(PRESETS["summarization"].reward_funcs)
QA_REWARDS = list(PRESETS["qa"].reward_funcs)
JSON_EXTRACTION_REWARDS = list(PRESETS["json_extraction"].reward_funcs)
math_problem_reward = gated(
    library.numeric_correctness_reward, by=library.soft_format_reward, name="math_problem_reward"
)
# Both require each tag once, in order, with content, and no other text. Line breaks are ignored.
strict_xml_format_reward, soft_xml_format_reward = (
    library.soft_format_reward.configured(f"{kind}_xml_format_reward")
    for kind in ("strict", "soft")
)
code_block_format_reward = library.soft_format_reward.configured(
    "code_block_format_reward", form=FORMS["code"]
)
