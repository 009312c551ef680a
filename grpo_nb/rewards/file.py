"""Run a Python file of rewards or of an environment, and find the rewards to train with.

Its rewards are functions in TRL's shape, or made by `@reward`, with all that they need. It may
define `reward_funcs` and `reward_weights` as TRL takes them; otherwise each reward that it defines
counts, with weight 1. The name `rewards` needs no import, and means `grpo_nb.rewards`.
"""

import hashlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_nb.rewards.combine import Adaptive, gated
from grpo_nb.rewards.contract import Reward, columns_read
from grpo_nb.rewards.limits import limited
from grpo_nb.rewards.sets import give_name
from grpo_nb.runs.files import read_json

HINT = "; what the rewards need (imports, constants, helpers) must be in the same file or cell"


def about_path(path: Path) -> Path:
    """Return the path of the notes that stage 02 writes about a file of rewards."""
    return path.with_suffix(".about.json")


def read_about(path: Path) -> dict[str, Any]:
    """Read {"form": preset, "ranges": {reward: [least, greatest]}} of a file; {} without notes."""
    return read_json(about_path(path)) if about_path(path).is_file() else {}


def load_source(path: Path, text: str | None = None, **names: Any) -> ModuleType:
    """Run a Python file as a module, and return the module.

    Args:
        path: The file.
        text: Its future content, if it is not written yet.
        names: Names that it may use without an import.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It raises; the message names the line.
    """
    if text is None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give the path of a Python file")
        text = path.read_text(encoding="utf-8")
    name = f"rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    vars(module).update(names)
    sys.modules[name] = module  # dataclasses look it up there
    try:
        limited(path.name, math.inf, exec, compile(text, str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        hint = HINT if isinstance(error, NameError) else ""
        place = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{path}{place} cannot be loaded: {error!r}{hint}") from error
    return module


def rewards_of(
    module: ModuleType, ranges: Mapping[str, Sequence[float]]
) -> list[tuple[Callable[..., Any], float]]:
    """Return (reward, weight) of each reward that the module trains with, correctness first.

    The first reward of a set decides what is correct. TRL requires no order, so rewards that read a
    column of the data, such as `answer`, go before the others.

    Args:
        module: What `load_source` returned.
        ranges: {reward: (least, greatest score)} of rewards that do not declare a range.

    Raises:
        ValueError: There is no reward, one is not a function, or the number of weights differs.
    """
    funcs = getattr(module, "reward_funcs", None)
    funcs = _defined(module) if funcs is None else funcs
    if not isinstance(funcs, list | tuple) or not all(map(callable, funcs)) or not funcs:
        raise ValueError(f"{module.__file__}: reward_funcs = {funcs!r} is not a list of functions")
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
    pairs = list(zip(funcs, weights, strict=True))
    return sorted(pairs, key=lambda pair: not columns_read(pair[0]))


def _defined(module: ModuleType) -> Sequence[Callable[..., Any]]:
    """Return the rewards that a module defines, if it does not list them."""
    rewards, candidates = [], []
    for name, value in vars(module).items():
        if is_own_reward(value, module.__name__):
            rewards.append(value)
        elif isinstance(value, Reward | gated | Adaptive) and name != value.__name__:
            candidates.append(name)  # not imported, but made here from others
    if candidates:
        raise ValueError(
            f"{module.__file__}: {', '.join(candidates)} may be rewards to train with or parts of "
            "others: say which, as in reward_funcs = [correct, brief]"
        )
    if not rewards:
        raise ValueError(
            f"{module.__file__} defines no reward: write a function of `completions`, lift one by "
            "@rewards.reward(), or list them in reward_funcs"
        )
    return rewards


def is_own_reward(value: Any, module: str) -> bool:
    """Return whether a value is a function or instance in TRL's shape, defined in this module."""
    if not callable(value) or isinstance(value, type):
        return False
    place = getattr(value, "__module__", "")  # an instance has its class's
    return place == module and "completions" in inspect.signature(value).parameters
