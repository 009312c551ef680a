"""Split each test: the program is asked inside the sandbox, and its answer is judged outside."""

import ast
import builtins
import functools
import json
import operator
from collections.abc import Callable
from typing import Any

from grpo_nb.sandbox.values import ProgramTest, plain, same, show

SHAPES = (
    '{"function": "f", "cases": [[[arguments], result], ...]}, {"stdin_stdout": [["in", "out"], '
    '...]}, or a list of strings as "assert f(2) == 4"; plain Python values, or their JSON text'
)


def parse_tests(tests: Any) -> list[ProgramTest]:
    """Parse tests in any of the three SHAPES."""
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
    if set(shape) == {"stdin_stdout"}:
        pairs = [(stdin, printed) for stdin, printed in shape["stdin_stdout"]]
        if not all(isinstance(text, str) for pair in pairs for text in pair):
            raise TypeError("stdin and stdout must be strings")
        return [
            ProgramTest(stdin, functools.partial(_prints, printed), show(printed))
            for stdin, printed in pairs
        ]
    if set(shape) != {"function", "cases"}:
        raise ValueError(f"unknown keys {sorted(shape)}")
    name = ast.unparse(ast.parse(shape["function"], mode="eval"))
    return [
        ProgramTest(
            (name, plain([*arguments])), functools.partial(same, plain(result)), show(result)
        )
        for arguments, result in shape["cases"]
    ]


def _prints(expected: str, printed: str) -> bool:
    lines, reference = (text.rstrip().split("\n") for text in (printed, expected))
    return [line.rstrip() for line in lines] == [line.rstrip() for line in reference]


_LITERAL = (ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.USub, ast.Load)
_LITERAL += (ast.BinOp, ast.Add, ast.Sub, ast.Mult)
_CONSTRUCTORS = {kind.__name__: kind for kind in (set, frozenset, tuple, list, dict, float)}


def parse_assert(text: str) -> ProgramTest:
    """Split an assert into a call to run in the sandbox, and a check of its result outside.

    The assert may be `f(2)` or `not f(2)`, judged by truth; `f(2) == 4` or `f(2) != 4`, with a
    literal on either side; or `f(2) is` True, False or None. Others are refused: in
    `all(f(i) == i for i in range(9))` or `abs(f(2) - 4) < 0.1` the program would judge itself.
    """
    try:
        (statement,) = ast.parse(text.strip()).body
        if not isinstance(statement, ast.Assert):
            raise ValueError("it is not an assert statement")
        node, holds, expected = _split(statement.test)
        if any(_meets_operator(part) for part in ast.walk(node)):
            raise ValueError("the program itself would compare the value, and could cheat")
    except (ValueError, TypeError, SyntaxError, AttributeError) as error:
        raise ValueError(
            f"assert {show(text)} cannot be judged from outside the program ({error}): write "
            "`assert f(x)`, `assert not f(x)`, or f(x) == or != a literal"
        ) from None
    return ProgramTest((ast.unparse(node), None), holds, expected)


def _split(test: ast.expr) -> tuple[ast.expr, Callable[[Any], bool], str]:
    """Return (expression to evaluate inside, judgement outside, text of the expected value)."""
    expected = f"a value such that {ast.unparse(test)}"
    if not isinstance(test, ast.Compare):
        negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
        node = test.operand if negated else test
        _must_be_the_programs(node)
        return node, operator.not_ if negated else bool, expected
    left, right, kind = test.left, test.comparators[0], type(test.ops[0])
    if len(test.ops) > 1 or kind not in (ast.Eq, ast.NotEq, ast.Is):
        raise ValueError("its comparison is not one of ==, != and is")
    if _is_literal(left) == _is_literal(right):
        raise ValueError("a comparison needs a literal on one side, and on one only")
    node, value = (right, _value(left)) if _is_literal(left) else (left, _value(right))
    if isinstance(value, bool) or value is None:
        _must_be_the_programs(node)
    elif kind is ast.Is:
        raise ValueError("`is` works with True, False and None")
    if kind is ast.NotEq:
        return node, lambda got: not same(value, got), expected
    return node, functools.partial(same, value), show(value) if kind is ast.Eq else expected


def _must_be_the_programs(node: ast.expr) -> None:
    """Refuse `isinstance(f(2), int)`, `math.isclose(f(2), 4)` and `f(2).startswith("a")`.

    An answer that is only true or false must come from a function or method of the program. Any
    other function would get the program's answer as an object, which can pretend to be anything.
    """
    owner = node.func if isinstance(node, ast.Call) else None
    if isinstance(owner, ast.Attribute):  # Solution().is_even(2)
        owner = owner.value.func if isinstance(owner.value, ast.Call) else None
        if isinstance(owner, ast.Name) and not owner.id[0].isupper():
            owner = None
    if not isinstance(owner, ast.Name) or hasattr(builtins, owner.id) or owner.id == "isclose":
        raise ValueError(f"{ast.unparse(node)} is not a call of a function of the program")


def _meets_operator(node: ast.AST) -> bool:
    operators = (ast.Compare, ast.BoolOp, ast.BinOp, ast.IfExp, ast.Not)
    return isinstance(node, operators) and any(
        isinstance(part, ast.Call)
        and not (isinstance(part.func, ast.Name) and hasattr(builtins, part.func.id))
        for part in ast.walk(node)
    )


def _is_literal(node: ast.expr) -> bool:
    return all(
        isinstance(part, _LITERAL)
        or (isinstance(part, ast.Call) and isinstance(part.func, ast.Name))
        or (isinstance(part, ast.Name) and part.id in _CONSTRUCTORS)
        for part in ast.walk(node)
    )


def _value(node: ast.expr) -> Any:
    code = compile(ast.Expression(node), "literal", "eval")
    return plain(eval(code, {"__builtins__": {}, **_CONSTRUCTORS}))
