"""Reward sets: presets, and any list of rewards and weights, from Python or YAML.

Weights are sums of powers of two where they can be. With 0.3 and 0.1 the rounding of equal
totals leaves a standard deviation of 1e-7, which TRL counts as a signal: its
frac_reward_zero_std then stays near 0 when every completion of a group earns the same.
"""

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.rewards import code, correctness, format, length, style
from grpo_nb.rewards.combine import Combined, gated
from grpo_nb.rewards.contract import Reward, declared_range
from grpo_nb.rewards.own import give_name, load_source, rewards_of
from grpo_nb.rewards.prompts import SYSTEM_PROMPT, extract_answer, tagged
from grpo_nb.runs import PROJECT_ROOT, files
from grpo_nb.runs.profiles import refuse_unknown

math_problem_reward = gated(
    correctness.numeric_correctness_reward,
    by=format.soft_xml_format_reward,
    name="math_problem_reward",
)


def _tagged(row: Mapping[str, Any]) -> str:
    """A completion that ought to earn every reward: any true step, then the gold."""
    return tagged("1+1=2", row["answer"])


class RewardSet(NamedTuple):
    """Rewards and weights, as TRL's `reward_funcs` and `reward_weights` take them.

    `reference(row)` writes a completion that has to earn every reward in full;
    `extract(text)` is what counts as the answer of a completion.
    """

    reward_funcs: list[Callable[..., Any]]
    reward_weights: list[float]
    system_prompt: str = SYSTEM_PROMPT
    reference: Callable[[Mapping[str, Any]], str] = _tagged
    extract: Callable[[str], str | None] = extract_answer

    def adding(self, func: Callable[..., Any], weight: float) -> "RewardSet":
        """This set and one more reward; one of the same name is replaced."""
        pairs = zip(self.reward_funcs, self.reward_weights, strict=True)
        kept = [pair for pair in pairs if pair[0].__name__ != func.__name__]
        funcs, weights = zip(*kept, (func, _weight(func, weight)), strict=True)
        return self._replace(reward_funcs=list(funcs), reward_weights=list(weights))

    @property
    def names(self) -> list[str]:
        return [func.__name__ for func in self.reward_funcs]

    @property
    def full(self) -> float:
        """The greatest score of the first reward, which says "correct"."""
        return declared_range(self.reward_funcs[0])[1]

    @property
    def format_name(self) -> str:
        """The first reward of format, which stands for "well-formed" in reports; "" for none."""
        return next((name for name in self.names if "_format_" in name), "")


def reward_set(
    pairs: Sequence[tuple[Callable[..., Any], float]], form: RewardSet | None = None, **about: Any
) -> RewardSet:
    """A set from `(reward, weight)` pairs, in the form of another set or as `about` says.

    Raises:
        ValueError: No reward, two with one name, which TRL's tables would merge, or a weight that
            is no finite number.
    """
    for func, _ in pairs:
        give_name(func)
    names = [func.__name__ for func, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or not pairs:
        raise ValueError(
            f"two rewards are named {twice[0]!r}: rename one, by .configured(name=…) if it is ours"
            if twice
            else "a reward set needs at least one reward"
        )
    about["reward_funcs"] = [func for func, _ in pairs]
    about["reward_weights"] = [_weight(*pair) for pair in pairs]
    return form._replace(**about) if form else RewardSet(**about)


def _weight(func: Callable[..., Any], weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        name = func.__name__
        raise ValueError(f"the weight of {name} is {weight!r}: write a number, such as 0.25")
    return float(weight)


MATH_REASONING_REWARDS = reward_set(
    [
        (correctness.numeric_correctness_reward, 1.0),
        (format.soft_xml_format_reward, 0.25),
        (format.incremental_format_reward, 0.25),
        (style.reasoning_quality_reward, 0.125),
    ]
)
CODE_GENERATION_REWARDS = reward_set(
    [
        (code.code_execution_reward, 1.0),
        (format.no_syntax_error_reward, 0.25),
        (format.code_block_format_reward, 0.25),
    ],
    system_prompt="Answer with one fenced block of Python code, marked ```python, and no more.",
    reference=lambda row: f"```python\n{row['answer']}\n```",
    extract=format.extract_code,
)
SUMMARIZATION_REWARDS = reward_set(
    [
        (correctness.overlap_reward, 1.0),
        (length.max_length_penalty.configured("brevity_penalty", maximum=64), 0.5),
        (style.no_repetition_penalty, 0.25),
    ],
    system_prompt="Summarize the text in one sentence.",
    reference=lambda row: str(row["answer"]),
)
QA_REWARDS = reward_set(
    [
        (correctness.exact_match_reward, 1.0),
        (correctness.fuzzy_match_reward, 0.25),
        (format.soft_xml_format_reward, 0.25),
    ]
)
JSON_EXTRACTION_REWARDS = reward_set(
    [
        (correctness.json_fields_reward, 1.0),
        (format.json_format_reward, 0.25),
        (length.max_length_penalty.configured("brevity_penalty", maximum=256), 0.125),
    ],
    system_prompt="Answer with one JSON object and no more.",
    reference=lambda row: str(row["answer"]),
)
PRESETS = {
    "math": MATH_REASONING_REWARDS,
    "code": CODE_GENERATION_REWARDS,
    "summarization": SUMMARIZATION_REWARDS,
    "qa": QA_REWARDS,
    "json_extraction": JSON_EXTRACTION_REWARDS,
}


def built_in() -> dict[str, Callable[..., Any]]:
    """{name: reward} of every reward of this package that needs no arguments."""
    modules = (correctness, format, length, style, code)
    found = {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, Reward | Combined) and name == value.__name__
    }
    return {**found, "math_problem_reward": math_problem_reward}


def load_preset(name: str, reward_weights: str = "") -> RewardSet:
    """The preset of that name, or the reward set of a YAML or Python file.

    Args:
        name: A name in PRESETS, or a path that ends in .yaml or .py.
        reward_weights: Other weights in the same order, "1, 0.5"; 0 keeps a reward in the
            metrics and out of the total.

    >>> load_preset("qa", "1, 0, 0.5").reward_weights
    [1.0, 0.0, 0.5]
    """
    if name.endswith((".yaml", ".yml")):
        preset = load_yaml(PROJECT_ROOT / name)
    elif name.endswith(".py"):
        preset = load_python(PROJECT_ROOT / name)
    else:
        refuse_unknown("rewards.preset", name, list(PRESETS))
        preset = PRESETS[name]
    return with_weights(preset, reward_weights) if reward_weights.strip() else preset


def with_weights(preset: RewardSet, reward_weights: str) -> RewardSet:
    """The same rewards with the weights of a text such as "1, 0.5".

    Raises:
        ValueError: Not one finite number for each reward.
    """
    try:
        weights = [float(weight) for weight in reward_weights.split(",")]
    except ValueError:
        weights = []
    if len(weights) != len(preset.names) or not all(map(math.isfinite, weights)):
        raise ValueError(
            f"rewards.reward_weights = {reward_weights!r}: write {len(preset.names)} numbers "
            f"with commas between them, for {', '.join(preset.names)}"
        )
    return preset._replace(reward_weights=weights)


def load_python(path: Path, text: str | None = None) -> RewardSet:
    """The rewards of a Python file, in the form of its `form` (a preset; math if it names none).

    A `reference(row)` or `extract(text)` that it defines goes before the form's own.

    Args:
        path: Of the file.
        text: What it will hold, where it is not written yet.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It raises, or holds no rewards.
    """
    module = load_source(path, text)
    about = {name: vars(module)[name] for name in ("reference", "extract") if name in vars(module)}
    return reward_set(rewards_of(module), load_preset(getattr(module, "form", "math")), **about)


def load_yaml(path: Path) -> RewardSet:
    """A reward set from a YAML list, or one that takes from a preset.

    `{extends: math, rewards: […]}` has the preset's rewards and then the list's, and its form:
    system prompt, reference, and what counts as the answer. `{form: math, rewards: […]}` has
    the form and the list's rewards alone; a list by itself has the form of math. An entry is
    `{reward: NAME, weight: 1.0, name: …, arguments: {…}}`; NAME is a built-in reward,
    `module:function`, or `file.py:function` (relative to the YAML file).

    Raises:
        FileNotFoundError: No such file.
        ValueError: An entry that is not of this form, a name that leads nowhere, or a file
            that raises.
    """
    content = files.load_yaml(path)
    base, kept = PRESETS["math"], False
    if isinstance(content, dict) and set(content) in ({"extends", "rewards"}, {"form", "rewards"}):
        kept = "extends" in content
        base, content = load_preset(str(content["extends" if kept else "form"])), content["rewards"]
    if not isinstance(content, list):
        raise ValueError(
            f"{path} holds no list: write `- reward: NAME` lines; or `extends: PRESET` (with its "
            "rewards) or `form: PRESET` (its prompt and reference alone), and them below `rewards:`"
        )
    if not content:
        raise ValueError(f"{path}: a reward set needs at least one reward: write `- reward: NAME`")
    pairs = [_entry(entry, path) for entry in content]
    if not kept:
        return reward_set(pairs, base)
    for func, weight in pairs:
        base = base.adding(func, weight)
    return base


def _entry(entry: Any, path: Path) -> tuple[Callable[..., Any], float]:
    if not isinstance(entry, dict) or "reward" not in entry:
        raise ValueError(f"{path}: {entry!r} names no reward: write `- reward: NAME`")
    for key in entry:
        refuse_unknown(f"key in {path.name}", key, ["reward", "weight", "name", "arguments"])
    options = entry.get("arguments") or {}
    wanted = {"reward": (entry["reward"], str), "name": (entry.get("name", ""), str)}
    for key, (value, kind) in (wanted | {"arguments": (options, dict)}).items():
        if not isinstance(value, kind):
            form = "text" if kind is str else "`{option: value}`"
            raise ValueError(
                f"{path}: {key}: {value!r} is no {form}: write it so, in quotes if need be"
            )
    func = find_reward(entry["reward"], path.parent)
    if options or "name" in entry:
        if not isinstance(func, Reward):
            raise ValueError(f"{path}: {entry['reward']} takes no arguments; lift it by @reward")
        func = func.configured(entry.get("name", ""), **options)
    return func, entry.get("weight", 1.0)


def find_reward(name: str, folder: Path) -> Callable[..., Any]:
    """A built-in reward, `module:function`, or `file.py:function` below `folder`."""
    place, colon, attribute = name.rpartition(":")
    if not colon:
        refuse_unknown("reward", name, sorted(built_in()))
        return built_in()[name]
    if place.endswith(".py"):
        module = load_source(folder / place)
    else:
        try:
            module = importlib.import_module(place)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise ValueError(f"reward {name!r}: {place} cannot be imported: {error!r}") from error
    if not hasattr(module, attribute):
        raise ValueError(f"reward {name!r}: {place} has no {attribute!r}")
    return getattr(module, attribute)
