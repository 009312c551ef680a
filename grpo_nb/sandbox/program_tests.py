"""Split each test into a call inside the sandbox and a judgement of its result outside."""

import ast
import builtins
import functools
import json
import operator
from collections.abc import Callable
from typing import Any

from grpo_nb.sandbox.values import ProgramTest, plain, same, show

SHAPES = (
    '{"function": "f", "cases": [[[arguments], result], ...]}, or a list of strings as '
    '"assert f(2) == 4"; plain Python values, or their JSON text'
)


def parse_tests(tests: Any) -> list[ProgramTest]:
    """Parse tests in either of the SHAPES."""
    try:
        shape = json.loads(tests) if isinstance(tests, str) else tests
        parsed = _parse_cases(shape) if isinstance(shape, dict) else []
    except (TypeError, ValueError, SyntaxError) as error:
        raise ValueError(f"tests {show(tests)}: {error}; give {SHAPES}") from None
    if isinstance(shape, list | tuple):
        parsed = [parse_assert(text) for text in shape]
    if not parsed:
        raise ValueError(f"tests {show(tests)} hold no test: give {SHAPES}")
    return parsed


def _parse_cases(shape: dict[str, Any]) -> list[ProgramTest]:
    shape = {key: value for key, value in shape.items() if value is not None}
    if set(shape) != {"function", "cases"}:
        raise ValueError(f"unknown keys {sorted(shape)}")
    name = ast.unparse(ast.parse(shape["function"], mode="eval"))
    return [
        ProgramTest(
            (name, plain([*arguments])), functools.partial(same, plain(result)), show(result)
        )
        for arguments, result in shape["cases"]
    ]


OPERATORS = (ast.Compare, ast.BoolOp, ast.BinOp, ast.IfExp)
_CONSTRUCTORS = {kind.__name__: kind for kind in (set, frozenset, tuple, list, dict, float)}


def parse_assert(text: str) -> ProgramTest:
    """Split an assert into a call to run in the sandbox, and a check of its result outside.

    The assert may be `f(2) == 4`, with a literal on the right, or `f(2)` or `not f(2)`, whose truth
    is judged. Other asserts are refused: in `all(f(i) == i for i in range(9))` or
    `abs(f(2) - 4) < 0.1`, the program would judge itself.
    """
    try:
        (statement,) = ast.parse(text.strip()).body
        if not isinstance(statement, ast.Assert):
            raise ValueError("it is not an assert statement")
        node, holds, expected = _split(statement.test)
        if not _calls(node):
            raise ValueError("it calls nothing")
        if any(isinstance(part, OPERATORS) and _calls(part) for part in ast.walk(node)):
            raise ValueError("the program itself would compare the value, and could cheat")
    except (ValueError, TypeError, SyntaxError, AttributeError) as error:
        raise ValueError(
            f"assert {show(text)} cannot be judged from outside the program ({error}): write "
            "`assert f(x) == a literal`, `assert f(x)` or `assert not f(x)`"
        ) from None
    return ProgramTest((ast.unparse(node), None), holds, expected)


def _split(test: ast.expr) -> tuple[ast.expr, Callable[[Any], bool], str]:
    """Return (expression for the sandbox, judgement outside it, text of the expected value)."""
    if not isinstance(test, ast.Compare):
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        node = test.operand if negated else test
        _must_be_the_programs(node)
        expected = f"a value such that {ast.unparse(test)}"
        return node, operator.not_ if negated else bool, expected
    if len(test.ops) > 1 or not isinstance(test.ops[0], ast.Eq):
        raise ValueError("its comparison is not ==")
    node, value = test.left, plain(_value(test.comparators[0]))
    if isinstance(value, bool) or value is None:
        _must_be_the_programs(node)
    return node, functools.partial(same, value), show(value)


def _value(node: ast.expr) -> Any:
    """Return the value of a literal, or of a call such as `set((1, 2))` or `float("nan")`."""
    func = node.func if isinstance(node, ast.Call) else None
    if isinstance(func, ast.Name) and func.id in _CONSTRUCTORS:
        return _CONSTRUCTORS[func.id](*map(ast.literal_eval, node.args))
    return ast.literal_eval(node)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [part for part in ast.walk(node) if isinstance(part, ast.Call)]


def _must_be_the_programs(node: ast.expr) -> None:
    """Refuse `isinstance(f(2), int)`, `math.isclose(f(2), 4)` and `f(2).startswith("a")`.

    A test that is only true or false must be one call of a function of the program. Such a function
    gets plain values; any other would get an object, which can pretend to be anything.
    """
    name = node.func if _calls(node) == [node] else None
    if not isinstance(name, ast.Name) or hasattr(builtins, name.id):
        raise ValueError(f"{ast.unparse(node)} is not one call of a function of the program")
