"""Import a package's exports only when they are used, so that a tool imports no other tools."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def exports(package: str, places: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for a package.

    Args:
        package: The package's `__name__`.
        places: For each module, the names that it exports, separated by spaces.

    >>> exports("shapes", {"math": "pi tau"})("pi")
    3.141592653589793
    """
    modules = {name: module for module, names in places.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return get
