"""Describe what a reward or an environment consists of, to detect that it was changed.

It consists of its file, the project's files that this file imports, its options, the fields of a
dataclass, and the code in closures and attributes. If other values or files matter, they change
what it does, which `reward_lab.behavior` compares.
"""

import ast
import hashlib
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CellType, ModuleType
from typing import Any

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.rewards.contract import Reward
from grpo_nb.runs.files import sha256

# Files in these folders come with Python, a library or this package: what they import is left out.
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
INSTALLED = [PROJECT_ROOT / "grpo_nb", *map(Path, _LIBRARIES)]


def describe(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Return what a value consists of, as lists of strings that are equal in every process.

    Args:
        value: A reward, or anything that a reward contains.
        above: The ids of the values that contain this one.
    """
    if value is None or isinstance(value, str | bytes | int | float | complex | Path):
        return repr(value)
    if id(value) in above:
        return "as above"
    inner = partial(describe, above=above | {id(value)})
    if isinstance(value, dict):
        return sorted(([inner(key), inner(item)] for key, item in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return list(map(inner, value))
    if isinstance(value, set | frozenset):
        return sorted(map(inner, value), key=repr)
    if isinstance(value, partial):
        return list(map(inner, (value.func, value.args, value.keywords)))
    if isinstance(value, ModuleType):
        return [value.__name__, _digest(getattr(value, "__file__", None))]
    if inspect.ismethod(value):
        return [inner(value.__func__), inner(value.__self__)]
    if isinstance(value, type):
        module = sys.modules.get(value.__module__)
        return [value.__qualname__, _digest(getattr(module, "__file__", None))]
    return _function(value, inner) if inspect.isfunction(value) else _instance(value, inner)


def _function(function: Any, inner: partial) -> list[Any]:
    code = function.__code__
    source = _digest(code.co_filename)
    if not source:
        try:
            source = inspect.getsource(function)
        except OSError:  # made by exec, without a source: use the bytecode
            source = code.co_code.hex() + repr(code.co_consts)
    cells = [cell for cell in function.__closure__ or () if cell != CellType()]  # filled later
    values = [cell.cell_contents for cell in cells] + list(vars(function).values())
    return [function.__qualname__, source, *map(inner, filter(callable, values))]


def _instance(value: Any, inner: partial) -> list[Any]:
    """Describe an object by its class and content, or by its repr if a library defines it."""
    file = getattr(sys.modules.get(type(value).__module__), "__file__", None)
    package = str(PROJECT_ROOT / "grpo_nb")
    ours = file and (file.startswith(package) or not _is_installed(Path(file)))
    if isinstance(value, Reward):
        content: Any = [value.score, value.settings, value.options]
    elif is_dataclass(value):  # a judge counts in attributes that are not fields
        content = {each.name: getattr(value, each.name, None) for each in fields(value)}
    elif ours or hasattr(value, "__wrapped__"):  # as `functools.cache` leaves it
        content = list(filter(callable, getattr(value, "__dict__", {}).values()))
    else:
        content = re.sub(" at 0x[0-9a-f]+", "", repr(value))
    return [inner(type(value)), inner(content)]


def _digest(path: str | None) -> str:
    """Return one digest of a Python file and of all files that it imports, in turn; "" without one.

    Imports count if they come from the project, or from a folder without installed packages.
    """
    hashes: dict[Path, str] = {}
    queue = [Path(path).resolve()] if path and Path(path).is_file() else []
    while queue:
        file = queue.pop()
        if file not in hashes:
            hashes[file] = sha256(file)
            if not _is_installed(file):
                queue += [each.resolve() for each in _imported(file) if each.is_file()]
    text = " ".join(sorted(hashes.values()))
    return text and hashlib.sha256(text.encode()).hexdigest()


def _is_installed(file: Path) -> bool:
    packages = {"site-packages", "dist-packages"}  # a user's too
    return bool(packages & {*file.parts}) or any(map(file.is_relative_to, INSTALLED))


def _imported(file: Path) -> Iterator[Path]:
    """Yield the paths that a file's imports may refer to."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        names, folder = [], None
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if node.level else None
            start = f"{node.module}." if node.module else ""
            names = [*filter(None, [node.module]), *(start + alias.name for alias in node.names)]
        for name in names:
            place = (folder or _folder_of(name)) / name.replace(".", "/")
            modules = place.with_suffix(".py"), place / "__init__.py"
            yield from (each for each in modules if not _is_installed(each))


def _folder_of(module: str) -> Path:
    """Return the folder that a module of that name is imported from."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(module.partition(".")[0])
        if spec and spec.submodule_search_locations:
            return Path(next(iter(spec.submodule_search_locations))).parent
        if spec and spec.has_location:
            return Path(spec.origin or "").parent
    return INSTALLED[0]
