"""Describe the source and the options of a reward or an environment, to detect changes.

The description covers the file, the options, and the fields of a dataclass. A change elsewhere,
such as in an imported module, shows only in the behavior, which `reward_lab.behavior` compares.
"""

import inspect
import re
import sys
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

from grpo_nb.files import sha256
from grpo_nb.rewards.contract import Reward


def describe(value: Any) -> Any:
    """Return a description of a value, as nested lists of strings that are equal in every process.

    Args:
        value: A reward, or anything that a reward contains.
    """
    if isinstance(value, Reward):
        return describe([value.score, value.settings, value.options])
    if isinstance(value, partial):
        return describe([value.func, value.args, value.keywords])
    if is_dataclass(value) and not isinstance(value, type):  # a judge's counts are not fields
        content = {each.name: getattr(value, each.name) for each in fields(value)}
        return describe([type(value), content])
    if isinstance(value, dict):
        return sorted(map(describe, value.items()), key=repr)
    if isinstance(value, set | frozenset):
        return sorted(map(describe, value), key=repr)
    if isinstance(value, list | tuple):
        return list(map(describe, value))
    if not callable(value):
        return _without_addresses(repr(value))
    code = inspect.unwrap(value)
    if not hasattr(code, "__qualname__"):
        code = type(code)
    return [code.__qualname__, _source(code)]


def _source(code: Any) -> str:
    """Return the digest of the file that defines a function or class, or else the source code."""
    if hasattr(code, "__code__"):
        path = code.__code__.co_filename
    else:
        path = getattr(sys.modules.get(code.__module__), "__file__", None)
    if path and Path(path).is_file():
        return sha256(Path(path))
    try:
        return inspect.getsource(code)
    except (OSError, TypeError):  # made by exec, without a source: use the bytecode
        code = getattr(code, "__code__", None)
        return code.co_code.hex() + _without_addresses(repr(code.co_consts)) if code else ""


def _without_addresses(text: str) -> str:
    return re.sub(" at 0x[0-9a-f]+", "", text)
