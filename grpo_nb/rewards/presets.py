"""Reward sets: presets, and any list of rewards and weights, from a Python file.

Weights are sums of powers of two where they can be. With 0.3 and 0.1 the rounding of equal
totals leaves a standard deviation of 1e-7, which TRL counts as a signal: its
frac_reward_zero_std then stays near 0 when every completion of a group earns the same.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from grpo_nb.rewards import code, correctness, format, length, style
from grpo_nb.rewards.combine import Gated, gated
from grpo_nb.rewards.contract import Reward, declared_range
from grpo_nb.rewards.own import give_name, load_source, rewards_of
from grpo_nb.rewards.prompts import SYSTEM_PROMPT, extract_answer, tagged
from grpo_nb.runs import PROJECT_ROOT, refuse_unknown

math_problem_reward = gated(
    correctness.numeric_correctness_reward,
    by=format.soft_xml_format_reward,
    name="math_problem_reward",
)


def _tagged(row: Mapping[str, Any]) -> str:
    """A completion that ought to earn every reward: any true step, then the reference answer."""
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
        return reward_set([*kept, (func, weight)], self)

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
    for func, weight in pairs:
        give_name(func)
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight):
            raise ValueError(
                f"the weight of {func.__name__} is {weight!r}: write a number, such as 0.25"
            )
    names = [func.__name__ for func, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two rewards are named {twice[0]!r}: rename one, by .configured(name=…) if it is ours"
        )
    if not pairs:
        raise ValueError("a reward set needs at least one reward")
    about["reward_funcs"] = [func for func, _ in pairs]
    about["reward_weights"] = [float(weight) for _, weight in pairs]
    return form._replace(**about) if form else RewardSet(**about)


PRESETS = {
    "math": reward_set(
        [
            (correctness.numeric_correctness_reward, 1.0),
            (format.soft_xml_format_reward, 0.25),
            (format.incremental_format_reward, 0.25),
            (style.reasoning_quality_reward, 0.125),
        ]
    ),
    "code": reward_set(
        [
            (code.code_execution_reward, 1.0),
            (format.no_syntax_error_reward, 0.25),
            (format.code_block_format_reward, 0.25),
        ],
        system_prompt="Answer with one fenced block of Python code, marked ```python, and no more.",
        reference=lambda row: f"```python\n{row['answer']}\n```",
        extract=format.extract_code,
    ),
    "summarization": reward_set(
        [
            (correctness.overlap_reward, 1.0),
            (length.max_length_penalty.configured("brevity_penalty", maximum=64), 0.5),
            (style.no_repetition_penalty, 0.25),
        ],
        system_prompt="Summarize the text in one sentence.",
        reference=lambda row: str(row["answer"]),
    ),
    "qa": reward_set(
        [
            (correctness.exact_match_reward, 1.0),
            (correctness.fuzzy_match_reward, 0.25),
            (format.soft_xml_format_reward, 0.25),
        ]
    ),
    "json_extraction": reward_set(
        [
            (correctness.json_fields_reward, 1.0),
            (format.json_format_reward, 0.25),
            (length.max_length_penalty.configured("brevity_penalty", maximum=256), 0.125),
        ],
        system_prompt="Answer with one JSON object and no more.",
        reference=lambda row: str(row["answer"]),
    ),
}


def load_preset(name: str, reward_weights: str = "") -> RewardSet:
    """The preset of that name, or the reward set of a Python file.

    Args:
        name: A name in PRESETS, or a path that ends in .py.
        reward_weights: Other weights in the same order, "1, 0.5"; 0 keeps a reward in the
            metrics and out of the total.

    Raises:
        FileNotFoundError: No such file.
        ValueError: No such preset, a file that cannot be used, or not one finite number for each
            reward.

    >>> load_preset("qa", "1, 0, 0.5").reward_weights
    [1.0, 0.0, 0.5]
    """
    if name.endswith((".yaml", ".yml")):
        raise ValueError(
            f"rewards.preset {name!r}: rewards are listed in a Python file, not in YAML: write "
            'extends = "math" and reward_funcs = […] into a .py file and name that'
        )
    if not name.endswith(".py"):
        refuse_unknown("rewards.preset", name, list(PRESETS))
    preset = load_python(PROJECT_ROOT / name) if name.endswith(".py") else PRESETS[name]
    if not reward_weights.strip():
        return preset
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
    """The rewards of a Python file: functions in TRL's shape, or lifted by `@reward`.

    They are its `reward_funcs`, weighed by its `reward_weights`; without these, each reward that it
    defines, with weight 1. The set has the form (system prompt, reference, and what counts as the
    answer) of the preset that the file names as `form`, math if it names none. If it names one as
    `extends`, the set has that preset's rewards too, before the file's own; one of the same name is
    replaced. A `reference(row)` or `extract(text)` that it defines goes before the form's.

    Args:
        path: Of the file.
        text: What it will hold, where it is not written yet.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It raises, or holds no rewards.
    """
    module = load_source(path, text)
    about = {name: vars(module)[name] for name in ("reference", "extract") if name in vars(module)}
    extends = getattr(module, "extends", "")
    base = load_preset(extends or getattr(module, "form", "math"))
    own = reward_set(rewards_of(module), base, **about)
    if not extends:
        return own
    for func, weight in zip(own.reward_funcs, own.reward_weights, strict=True):
        base = base.adding(func, weight)
    return base._replace(**about)


def built_in() -> dict[str, Callable[..., Any]]:
    """{name: reward} of every reward of this package that needs no arguments."""
    modules = correctness, format, length, style, code
    named = [pair for module in modules for pair in vars(module).items()]
    named += [("math_problem_reward", math_problem_reward)]
    return {k: v for k, v in named if isinstance(v, Reward | Gated) and v.__name__ == k}
