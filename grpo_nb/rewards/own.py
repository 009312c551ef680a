"""Rewards from a Python file: read, run in a namespace of its own, and what it trains with.

Such a file is a cell of notebook 2, or one given as `rewards.preset`: functions in TRL's shape or
lifted by `@reward`, and all that they need. It may say `reward_funcs` and `reward_weights` as TRL
takes them; otherwise each reward that it defines counts, with weight 1.
"""

import hashlib
import inspect
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_nb.rewards.combine import Adaptive, Gated
from grpo_nb.rewards.contract import Reward

TRLS_OWN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
HINT = "; what the rewards need (imports, constants, helpers) must be in the same file or cell"


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


def give_name(func: Callable[..., Any], name: str = "") -> None:
    """Name it as TRL does: a partial as its function, an instance `name` or as its class."""
    inner = func
    while isinstance(inner, partial):
        inner = inner.func
    if not hasattr(func, "__name__"):
        func.__name__ = getattr(inner, "__name__", name or type(inner).__name__)


def load_source(path: Path, text: str | None = None) -> ModuleType:
    """A Python file run as a module; `text` is what it will hold, where it is not written yet.

    Raises:
        FileNotFoundError: No such file.
        ValueError: It raises; the message names the line.
    """
    if text is None:
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: give a Python file of rewards")
        text = path.read_text(encoding="utf-8")
    name = f"rewards_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look it up there
    try:
        exec(compile(text, str(path), "exec"), vars(module))
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
        elif isinstance(value, Reward | Gated | Adaptive) and name != value.__name__:
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
