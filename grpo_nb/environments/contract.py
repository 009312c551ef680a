"""What an environment is: a class whose tools the model calls."""

from collections.abc import Callable
from typing import Any


def tool(function: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method as a tool that the model may call."""
    function.is_tool = True  # type: ignore[attr-defined]
    return function
