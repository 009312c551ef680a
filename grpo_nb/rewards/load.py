"""Load a run's rewards: a preset by name, or the rewards of a Python file.

A file contains rewards (functions in TRL's shape, or made by `@reward`) and everything that they
need. It may define `reward_funcs` and `reward_weights` as in TRL; otherwise every reward that it
defines is used, with weight 1. In the file, `rewards` means `grpo_nb.rewards` and needs no import.
"""

import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from grpo_nb import rewards
from grpo_nb.answers import find_form
from grpo_nb.files import read_json, sha256
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.contract import Reward, columns_read
from grpo_nb.rewards.sets import PRESETS, Adaptive, RewardSet, gated, give_name, reward_set

if TYPE_CHECKING:
    from grpo_nb.runs.settings import RewardsConfig

HINT = "; what the rewards need (imports, constants, helpers) must be in the same file or cell"


def load_rewards(config: "RewardsConfig") -> RewardSet:
    """Return the rewards of a run, in the run's form; the errors are those of `load_preset`."""
    values = config.preset, config.reward_weights, config.form, config.opened, config.about
    return load_preset(*values)


def load_preset(
    name: str,
    reward_weights: str = "",
    form: str = "",
    opened: str = "",
    about: Mapping[str, Any] | None = None,
) -> RewardSet:
    """Return the preset of that name, or the reward set of a Python file.

    Args:
        name: A name in PRESETS, or a path that ends in .py.
        reward_weights: Other weights in the order of the rewards, such as "1, 0.5". A reward with
            weight 0 is in the metrics but not in the total.
        form: The form of completions, a name in FORMS; "" keeps the form of the preset or file.
        opened: The tag that the chat template opens at the end of a prompt, if any.
        about: Notes on a file, in the format of `read_about`; by default those stored with it.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The preset or form does not exist, the file cannot be used, or the weights are
            not one number for each reward.

    >>> load_preset("qa", "1, 0, 0.5").reward_weights
    [1.0, 0.0, 0.5]
    """
    if name.endswith(".py"):
        preset = load_python(PROJECT_ROOT / name, about=about or None)
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
    if len(weights) != len(preset.names):
        raise ValueError(
            f"rewards.reward_weights = {reward_weights!r}: write {len(preset.names)} numbers, "
            f"separated by commas, for {', '.join(preset.names)}"
        )
    return preset._replace(reward_weights=weights)


def load_python(
    path: Path, text: str | None = None, about: Mapping[str, Any] | None = None
) -> RewardSet:
    """Return the rewards of a Python file, which are functions in TRL's shape or made by `@reward`.

    The file may define `reward_funcs` and `reward_weights`. Otherwise every reward that it defines
    is used, with weight 1. The file's variable `form` is the name of a form, or of a preset whose
    form is used; the default is the form in the notes, or else tags. If the file defines
    `reference(row)`, that function replaces the form's. The file's variable `correct` is the reward
    that decides what is correct, or the name of that reward; the default is the reward that stage
    02 found, or else the first one that reads a column.

    Args:
        path: The file.
        text: The file's future content, if it is not written yet.
        about: Notes that replace those stored with the file, in the format of `read_about`.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file raises an error, or contains no rewards.
    """
    notes = read_about(path) if about is None else about
    module = load_source(path, text)
    form = getattr(module, "form", notes.get("form", ""))
    form = form if isinstance(form, str) else ""  # `form` may also be the name of a reward
    if form in PRESETS or form.endswith(".py"):
        base = load_preset(form)
    else:
        base = RewardSet([], [], find_form(form or "tags"))
    pairs = rewards_of(module, notes.get("ranges", {}))
    correct = getattr(module, "correct", notes.get("correct", "")) or next(
        (func.__name__ for func, _ in pairs if columns_read(func)), ""
    )
    correct = getattr(correct, "__name__", correct)
    own = getattr(module, "reference", base.own_reference)
    return reward_set(pairs, base, own_reference=own, correct=str(correct))


def about_path(path: Path) -> Path:
    """Return the path of the notes that stage 02 writes about a file of rewards."""
    return path.with_suffix(".about.json")


def read_about(path: Path) -> dict[str, Any]:
    """Return a file's notes; {} if there are none.

    The notes are {"form": the preset whose form is used, "ranges": {reward: [low, high]},
    "correct": the name of the reward that decides what is correct}.
    """
    return read_json(about_path(path)) if about_path(path).is_file() else {}


def load_source(path: Path, text: str | None = None) -> ModuleType:
    """Run a Python file as a module, and return the module.

    Args:
        path: The file.
        text: The file's future content, if it is not written yet.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file raises an error; the message names the line.
    """
    if text is None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give the path of a Python file")
        text = path.read_text(encoding="utf-8")
    name = f"rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    module.rewards = rewards
    sys.modules[name] = module  # where dataclasses look up the module
    try:
        exec(compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ValueError(f"{path} cannot be loaded: {explained(error, path, text)}") from error
    return module


def explained(error: BaseException, path: Path | str, text: str) -> str:
    """Return an error's message, with the line of the file that raised the error, if known."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame.lineno for frame in frames if frame.filename.endswith(str(path))]
    if isinstance(error, SyntaxError) and not places:
        places = [error.lineno]
    if not places:
        return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    hint = HINT if isinstance(error, NameError) else ""
    line = text.splitlines()[places[-1] - 1].strip()
    return f"line {places[-1]} ({line}): {type(error).__name__}: {error}{hint}"


def rewards_of(
    module: ModuleType, ranges: Mapping[str, Sequence[float]]
) -> list[tuple[Callable[..., Any], float]]:
    """Return (reward, weight) of each reward to train with, in the file's order.

    Without a list `reward_funcs`, a function that another reward calls is a helper, not a reward.

    Args:
        module: The module that `load_source` returned.
        ranges: {reward: (lowest, highest score)} of rewards that do not declare a range.

    Raises:
        ValueError: There is no reward, a reward is not callable, or the number of weights differs.
    """
    funcs, parts = getattr(module, "reward_funcs", None), []
    if funcs is None:
        funcs = [value for value in vars(module).values() if is_own_reward(value, module.__name__)]
        helpers = {name for func in funcs for name in names_in(func) if name != func.__name__}
        funcs = [func for func in funcs if getattr(func, "__name__", "") not in helpers]
        # A reward made from others may be one to train with, or only a part of another reward.
        ours = {n: v for n, v in vars(module).items() if isinstance(v, Reward | gated | Adaptive)}
        parts = [n for n, v in ours.items() if n != v.__name__ and v not in funcs]
    is_list = isinstance(funcs, list | tuple) and all(map(callable, funcs))
    if parts or not funcs or not is_list:
        raise ValueError(
            f"{module.__file__}: {parts or funcs!r} is not a list of rewards to train with: write "
            "functions of `completions`, decorate scorers with @rewards.reward(), or list the "
            "rewards, as in reward_funcs = [correct, brief]"
        )
    names = {id(value): name for name, value in vars(module).items()}
    for func in funcs:
        give_name(func, names.get(id(func), ""))
        if func.__name__ in ranges:
            func.range = tuple(ranges[func.__name__])
    weights = getattr(module, "reward_weights", None) or [1.0] * len(funcs)
    if len(weights) != len(funcs):
        raise ValueError(
            f"{module.__file__}: {len(weights)} reward_weights for {len(funcs)} reward_funcs, "
            f"which are {', '.join(func.__name__ for func in funcs)}: give one for each"
        )
    return list(zip(funcs, weights, strict=True))


def source_digest(value: Any) -> str:
    """Return the name of a function or class, and the digest of the file that defines it.

    If there is no file, the source of the function or class, or its bytecode, replaces the digest.
    """
    code = inspect.unwrap(value)
    code = code if hasattr(code, "__qualname__") else type(code)
    try:
        path = Path(inspect.getfile(code))
        source = sha256(path) if path.is_file() else inspect.getsource(code)
    except (OSError, TypeError):  # made by exec
        code = getattr(code, "__code__", None)
        source = repr(code and (code.co_code, code.co_consts))
        source = re.sub(" at 0x[0-9a-f]+", "", source)
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} {source}"


def names_in(func: Callable[..., Any]) -> set[str]:
    """Return the names that a function looks up, such as those of its helpers."""
    return set(_names(func.__code__)) if hasattr(func, "__code__") else set()


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function and the functions inside it look up."""
    yield from code.co_names
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names(part)


def is_own_reward(value: Any, module: str) -> bool:
    """Return whether a value is a function or instance in TRL's shape that this module defines."""
    if not callable(value) or isinstance(value, type):
        return False
    place = getattr(value, "__module__", "")  # an instance has that of its class
    return place == module and "completions" in inspect.signature(value).parameters
