"""Read what a reward's code mentions: its strings, the columns it reads, and what it lacks.

Nothing is parsed: strings are found in the compiled code, in the globals, closures, defaults and
attributes that it uses, and in the helpers of the same module that it calls.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from grpo_nb.rewards import Reward
from grpo_nb.rewards.contract import columns_read, parameters_of, unwrapped
from grpo_nb.rewards.load import names_in

DEPTH, MANY = 8, 200  # how deep values are followed, and how many items of a collection


def strings_of(func: Callable[..., Any]) -> list[str]:
    """Return the strings that a reward mentions, regular expressions included, each once.

    >>> tag = "<answer>"
    >>> def right(completions, **kwargs):
    ...     return [float(tag in text and kwargs["gold"][0] in text) for text in completions]
    >>> {"<answer>", "gold"} <= set(strings_of(right))
    True
    """
    leaves = _walked(func, _module(func), set(), 0)
    return list(dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, str)))


def names_used(func: Callable[..., Any]) -> set[str]:
    """Return the names that the code of a reward, and of its helpers, uses.

    >>> import time
    >>> def now(): return time.time()
    >>> def late(completions, **kwargs): return [now()] * len(completions)
    >>> "time" in names_used(late)
    True
    """
    functions = [f for f in _walked(func, _module(func), set(), 0) if not isinstance(f, str)]
    return names_in(func).union(*map(names_in, functions))


def _module(func: Any) -> str:
    return getattr(unwrapped(func), "__module__", "") or ""


def _walked(value: Any, module: str, visited: set[int], depth: int) -> Iterator[str | FunctionType]:
    """Yield strings and functions in a value; functions of other modules only at the start."""
    if isinstance(value, str):
        yield value
        return
    if depth > DEPTH or id(value) in visited:
        return
    visited.add(id(value))
    parts = _parts(value, module, depth)
    if isinstance(value, FunctionType) and parts:
        yield value
    for part in parts:
        if not isinstance(part, int | float):
            yield from _walked(part, module, visited, depth + 1)


def _parts(value: Any, module: str, depth: int) -> Sequence[Any]:
    """Return what a value consists of, as far as a reward uses it."""
    if isinstance(value, re.Pattern):
        return [value.pattern] if isinstance(value.pattern, str) else []
    if isinstance(value, CodeType):
        return list(value.co_consts)
    if isinstance(value, dict):
        return [part for pair in list(value.items())[:MANY] for part in pair]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)[:MANY]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, Reward):
        return [value.score, value.options, [*value.columns, *value._optional]]
    if isinstance(value, FunctionType):
        if depth > 2 and value.__module__ != module:
            return []
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        names = names_in(value) & value.__globals__.keys()
        return [value.__code__, cells, value.__defaults__, value.__kwdefaults__] + [
            value.__globals__[name] for name in sorted(names)
        ]
    if hasattr(type(value), "__call__") and _module(type(value)) == module:  # noqa: B004
        members = [*vars(type(value)).values()] if not isinstance(value, type) else []
        return [getattr(value, "__dict__", {}), *members, getattr(value, "__wrapped__", None)]
    return [value.__wrapped__] if hasattr(value, "__wrapped__") else []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 (raises if the closure's variable is not set yet)
    except ValueError:
        return False
    return True


def columns_of(func: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return which of the dataset's columns a reward reads, in the dataset's order."""
    required, optional, takes_any = parameters_of(func)
    is_lookup = takes_any and not isinstance(func, Reward)
    names = {*required, *optional, *(strings_of(func) if is_lookup else ())}
    return [name for name in columns if name in names]


def mentions(func: Callable[..., Any], name: str) -> bool:
    """Return whether a reward reads an argument of TRL's, such as `completion_ids`."""
    required, optional, _ = parameters_of(func)
    is_lookup = name not in (*required, *optional) and not isinstance(func, Reward)
    return name in strings_of(func) if is_lookup else name in (*required, *optional)


def missing_columns(func: Callable[..., Any], columns: Sequence[str]) -> list[str]:
    """Return the columns that a reward's signature needs and the dataset lacks."""
    return [name for name in columns_read(func, required=True) if name not in columns]


def accepted(func: Callable[..., Any]) -> set[str] | None:
    """Return the names of the arguments that a reward takes; None if it takes any.

    >>> accepted(lambda completions, answer: [0.0]) == {"completions", "answer"}
    True
    """
    required, optional, takes_any = parameters_of(func)
    return None if takes_any else {*required, *optional}
