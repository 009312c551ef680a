"""Reward sets: presets (presets.yaml), any list of rewards and weights, and those of a Python file.

Such a file is a cell of notebook 2, or one given as `rewards.preset`: functions in TRL's shape or
lifted by `@reward`, and all that they need. It may say `reward_funcs` and `reward_weights` as TRL
takes them; otherwise each reward that it defines counts, with weight 1.
"""

import hashlib
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from grpo_nb.answers.forms import TAGS, Form, find_form
from grpo_nb.rewards import code, correctness, format, length, style
from grpo_nb.rewards.combine import Adaptive, gated, is_async
from grpo_nb.rewards.contract import Reward, declared_range
from grpo_nb.rewards.limits import LIMIT, limited
from grpo_nb.runs import PROJECT_ROOT, refuse_unknown
from grpo_nb.runs.files import read_yaml
from grpo_nb.runs.settings import RewardsConfig

TRLS_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
ENDS = re.compile(r"^[^#\n]*?\b(os\.(?:_exit|abort)|_exit)\(", re.MULTILINE)
HINT = "; what the rewards need (imports, constants, helpers) must be in the same file or cell"

math_problem_reward = gated(
    correctness.numeric_correctness_reward,
    by=format.soft_format_reward,
    name="math_problem_reward",
)


class RewardSet(NamedTuple):
    """Rewards and weights, as TRL's `reward_funcs` and `reward_weights` take them, and their form.

    reward_funcs: The first says "correct".
    form: How completions are written. `reference(row)` writes one that has to earn every reward in
        full; `extract(text)` is what counts as the answer of one.
    result: A sentence on what the result is, for the system prompt of another form.
    own: A `reference` and an `extract` of a file, which go before the form's.
    """

    reward_funcs: list[Callable[..., Any]]
    reward_weights: list[float]
    form: Form = TAGS
    result: str = ""
    own: Mapping[str, Callable[..., Any]] | None = None

    def reference(self, row: Mapping[str, Any]) -> str:
        """A completion of the row that has to earn every reward in full."""
        return (self.own or {}).get("reference", self.form.reference)(row)

    def extract(self, text: str) -> str | None:
        """What counts as the answer of a completion."""
        return (self.own or {}).get("extract", self.form.extract)(text)

    def in_form(self, name: str = "", opened: str = "") -> "RewardSet":
        """The set in another form; a reward of what the form does not have is left out.

        A reward that was configured with a form of its own keeps it, and so do those that are not
        ours.

        Args:
            name: As `rewards.form` has it; "" keeps the form.
            opened: What the chat template opens at the end of a prompt, as "<think>\\n".
        """
        form = self.form
        if name and name != form.name:
            form = find_form(name)
            asked = f"{form.system_prompt} {self.result}".strip()
            form = form._replace(system_prompt=asked)
        form = form._replace(opened=opened)
        pairs = [
            (_in_form(func, self.form, form), weight)
            for func, weight in zip(self.reward_funcs, self.reward_weights, strict=True)
            if not isinstance(func, Reward) or form.has(func.settings.needs)
        ]
        return reward_set(pairs, self._replace(form=form))

    def limited(self, seconds: float) -> "RewardSet":
        """This set, whose rewards have a limit [s a completion]; not async ones, and not ours."""
        for func in self.reward_funcs:
            ours = isinstance(func, Reward) and func.__module__.startswith("grpo_nb.")
            if not ours and not is_async(func):
                setattr(func, LIMIT, seconds)
        return self

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


def _in_form(func: Callable[..., Any], before: Form, form: Form) -> Callable[..., Any]:
    """A reward of ours, or the parts of a gate, asking `form` where it asked `before`."""
    if isinstance(func, gated | Adaptive):
        parts = {name: getattr(func, name) for name in ("reward", "by") if hasattr(func, name)}
        changed = {name: _in_form(part, before, form) for name, part in parts.items()}
        return func if changed == parts else replace(func, **changed)
    takes = isinstance(func, Reward) and "form" in func.option_names
    asked = func.options.get("form", TAGS) if takes else None
    if form == asked or asked not in (before, TAGS):
        return func
    return func.configured(func.__name__, form=form)


def give_name(func: Callable[..., Any], name: str = "") -> None:
    """Name it as TRL does: a partial as its function, an instance `name` or as its class."""
    inner = func
    while isinstance(inner, partial):
        inner = inner.func
    if not hasattr(func, "__name__"):
        func.__name__ = getattr(inner, "__name__", name or type(inner).__name__)


def reward_set(
    pairs: Sequence[tuple[Callable[..., Any], float]], like: RewardSet | None = None, **about: Any
) -> RewardSet:
    """A set from `(reward, weight)` pairs; the rest as another set has it, or as `about` says.

    Rewards of ours that were not configured with a form ask the set's.

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
    made = (like or RewardSet([], []))._replace(**about)
    funcs = [_in_form(func, TAGS, made.form) for func, _ in pairs]
    return made._replace(reward_funcs=funcs, reward_weights=[float(weight) for _, weight in pairs])


def built_in() -> dict[str, Callable[..., Any]]:
    """{name: reward} of every reward of this package that needs no arguments."""
    modules = correctness, format, length, style, code
    named = [pair for module in modules for pair in vars(module).items()]
    named += [("math_problem_reward", math_problem_reward)]
    return {k: v for k, v in named if isinstance(v, Reward | gated) and v.__name__ == k}


def _preset(
    rewards: Mapping[str, Any], form: str = "tags", system_prompt: str = "", result: str = ""
) -> RewardSet:
    """A set as presets.yaml has it."""
    pairs, ours = [], built_in()
    for name, weight in rewards.items():
        options = weight if isinstance(weight, dict) else {"reward": name, "weight": weight}
        func, weight = ours[options.pop("reward")], options.pop("weight")
        pairs.append((func.configured(name, **options) if options else func, weight))
    own = {"system_prompt": system_prompt} if system_prompt else {}
    return reward_set(pairs, form=find_form(form)._replace(**own), result=result)


PRESETS = {
    name: _preset(**about) for name, about in read_yaml(Path(__file__).with_suffix(".yaml")).items()
}


def load_rewards(config: RewardsConfig) -> RewardSet:
    """The rewards of a run, in its form; errors as of `load_preset`.

    Those of a file have the limit `rewards.seconds`.
    """
    preset = load_preset(config.preset, config.reward_weights, config.form, config.opened)
    return preset.limited(config.seconds)


def load_preset(name: str, reward_weights: str = "", form: str = "", opened: str = "") -> RewardSet:
    """The preset of that name, or the reward set of a Python file.

    Args:
        name: A name in PRESETS, or a path that ends in .py.
        reward_weights: Other weights in the same order, "1, 0.5"; 0 keeps a reward in the
            metrics and out of the total.
        form: How completions are written, a name in FORMS; empty: as the preset or file says.
        opened: What the chat template opens at the end of a prompt.

    Raises:
        FileNotFoundError: No such file.
        ValueError: No such preset or form, a file that cannot be used, or not one finite
            number for each reward.

    >>> load_preset("qa", "1, 0, 0.5").reward_weights
    [1.0, 0.0, 0.5]
    """
    if name.endswith(".py"):
        preset = load_python(PROJECT_ROOT / name)
    else:
        refuse_unknown("rewards.preset", name, [*PRESETS, "a .py file of rewards"])
        preset = PRESETS[name]
    if form or opened:
        preset = preset.in_form(form, opened)
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
    defines, with weight 1. `form` in it names the form, or a preset whose form is taken; tags if it
    names none. If it names a preset as `extends`, the set has its rewards too, before the file's
    own; one of the same name is replaced. A `reference(row)` or `extract(text)` that it defines
    goes before the form's.

    Args:
        path: Of the file.
        text: What it will hold, where it is not written yet.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It raises, or holds no rewards.
    """
    module = load_source(path, text, ends=False)
    about = {name: vars(module)[name] for name in ("reference", "extract") if name in vars(module)}
    extends, form = getattr(module, "extends", ""), getattr(module, "form", "")
    form = form if isinstance(form, str) else ""  # a reward may be named so as well
    of_preset = form in PRESETS or form.endswith(".py")
    base = load_preset(extends or (form if of_preset else "math"), form="" if of_preset else form)
    own = reward_set(rewards_of(module), base, own=about or base.own)
    if not extends:
        return own
    for func, weight in zip(own.reward_funcs, own.reward_weights, strict=True):
        base = base.adding(func, weight)
    return base._replace(own=own.own)


def columns_read(reward_func: Callable[..., Any], required: bool = False) -> list[str]:
    """The dataset columns that a reward names among its parameters; or those without a default."""
    if hasattr(reward_func, "columns"):
        optional = [] if required else getattr(reward_func, "_optional", ())
        names = [*reward_func.columns, *optional]
    else:
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(reward_func).parameters.values()
        read = [p for p in parameters if p.kind not in kinds]
        names = [p.name for p in read if not required or p.default is p.empty]
        names = [name for name in names if name not in getattr(reward_func, "keywords", {})]
    return [name for name in names if name not in (*TRLS_OWN, "environments")]


def load_source(path: Path, text: str | None = None, ends: bool = True) -> ModuleType:
    """A Python file run as a module; `text` is what it will hold, where it is not written yet.

    Unless `ends`, it must not call what ends the process at once: no limit holds for that.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It raises; the message names the line.
    """
    if text is None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give the path of a Python file")
        text = path.read_text(encoding="utf-8")
    if not ends and (call := ENDS.search(text)):
        line = text.count("\n", 0, call.start(1)) + 1
        raise ValueError(
            f"{path}, line {line}: {call[1]}() would end the training or the notebook: return a "
            "score or None, or raise an error"
        )
    name = f"rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look it up there
    try:
        limited(path.name, math.inf, exec, compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)
        ]
        hint = HINT if isinstance(error, NameError) else ""
        place = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{path}{place} cannot be loaded: {error!r}{hint}") from error
    return module


def rewards_of(module: ModuleType) -> list[tuple[Callable[..., Any], float]]:
    """(reward, weight) of each that the module trains with, correctness first.

    The first of a set says "correct". TRL asks for no order, so those that read a column of the
    data, such as `answer`, go before those that do not.

    Raises:
        ValueError: None, something that is no function, or another number of weights.
    """
    funcs = getattr(module, "reward_funcs", None)
    funcs = _defined(module) if funcs is None else funcs
    if not isinstance(funcs, list | tuple) or not all(map(callable, funcs)) or not funcs:
        raise ValueError(f"{module.__file__}: reward_funcs = {funcs!r} is not a list of functions")
    names = {id(value): name for name, value in vars(module).items()}
    for func in funcs:
        give_name(func, names.get(id(func), ""))
        if func.__name__ in getattr(module, "measured_ranges", {}):
            func.range = tuple(module.measured_ranges[func.__name__])
    weights = getattr(module, "reward_weights", None) or [1.0] * len(funcs)
    if len(weights) != len(funcs):
        raise ValueError(
            f"{module.__file__}: {len(weights)} reward_weights for {len(funcs)} reward_funcs, "
            f"which are {', '.join(func.__name__ for func in funcs)}: give one for each"
        )
    pairs = list(zip(funcs, weights, strict=True))
    return sorted(pairs, key=lambda pair: not columns_read(pair[0]))


def _defined(module: ModuleType) -> Sequence[Callable[..., Any]]:
    """The rewards that a module defines, for one that does not list them."""
    found, made = [], []
    for name, value in vars(module).items():
        if _is_own_reward(value, module.__name__):
            found.append(value)
        elif isinstance(value, Reward | gated | Adaptive) and name != value.__name__:
            made.append(name)  # not imported, but made here of others
    if made:
        raise ValueError(
            f"{module.__file__}: {', '.join(made)} may be rewards to train with or parts of "
            "others: say which, as in reward_funcs = [correct, brief]"
        )
    if not found:
        raise ValueError(
            f"{module.__file__} defines no reward: write a function of `completions`, lift one by "
            "@rewards.reward(), or list them in reward_funcs"
        )
    return found


def _is_own_reward(value: Any, module: str) -> bool:
    """Whether it has TRL's shape and was defined there: a function, or an instance of a class."""
    if not callable(value) or isinstance(value, type):
        return False
    place = getattr(value, "__module__", "")  # an instance has its class's
    return place == module and "completions" in inspect.signature(value).parameters
