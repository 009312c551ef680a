"""Ask a program inside the sandbox, and judge its answers outside."""

import ast
import builtins
import functools
import json
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from grpo_nb.sandbox.bubblewrap import (
    DEFAULT_LIMITS,
    Limits,
    Opaque,
    Outcome,
    bubblewrap_problem,
    in_bubblewrap,
)

SHAPES = (
    '{"function": "f", "cases": [[[arguments], result], ...]}, {"stdin_stdout": [["in", "out"], '
    '...]}, or a list of strings as "assert f(2) == 4"; plain Python values, or their JSON text'
)


class Verdict(NamedTuple):
    """Describe the results of a program in its tests.

    Attributes:
        reasons: One per test, such as "wrong value: got 5, expected 4"; "" if it passed.
        failure: Why the sandbox itself failed; "" if it did not. The program is not to blame for
            such a failure, so a reward gives None.
    """

    passed: int
    total: int
    reasons: tuple[str, ...]
    failure: str = ""

    @property
    def share(self) -> float:
        """Return the share of the tests that passed."""
        return self.passed / self.total


class ProgramTest(NamedTuple):
    ask: Any  # what enters the sandbox: (expression, arguments or None), or stdin's text
    holds: Callable[[Any], bool]
    expected: str


def run_tests(code: str, tests: Any, *, limits: Limits = DEFAULT_LIMITS) -> Verdict:
    """Run one program against its tests and return the verdict.

    Args:
        code: The program.
        tests: Its tests, in one of the three shapes that `grpo_nb.sandbox` describes.
        limits: What the program may use.

    Raises:
        ValueError: Tests have an unknown shape, or an assert cannot be judged from outside.
        RuntimeError: Bubblewrap does not work here; the message names what to install.
    """
    parsed = parse_tests(tests)
    outcome = _run(code, [test.ask for test in parsed], limits)
    ending = outcome.failure or outcome.ending or "gave no answer"
    answers = outcome.answers + [("failed", ending)] * (len(parsed) - len(outcome.answers))
    reasons = tuple(map(reason_of, parsed, answers))
    return Verdict(reasons.count(""), len(parsed), reasons, outcome.failure)


def run_program(code: str, stdin: str = "", *, limits: Limits = DEFAULT_LIMITS) -> tuple[bool, str]:
    """Run one program and return what it prints.

    Args:
        code: The program.
        stdin: Its standard input.
        limits: What the program may use.

    Returns:
        Whether the program succeeded, and what it printed or why it failed.

    Raises:
        RuntimeError: The sandbox does not work here, or failed.
    """
    outcome = _run(code, [stdin], limits)
    if outcome.failure:
        raise RuntimeError(outcome.failure)
    [(kind, output)] = outcome.answers or [("failed", outcome.ending)]
    text = output if isinstance(output, str) else show(output)  # any value may be forged
    return kind == "value", text.encode(errors="replace").decode()


def _run(code: str, asks: list[Any], limits: Limits) -> Outcome:
    if problem := bubblewrap_problem():
        raise RuntimeError(
            f"no sandbox for generated code: bubblewrap does not work here ({problem}): "
            "`apt-get install bubblewrap` (0.8 or later), allow user namespaces"
        )
    return in_bubblewrap(code, asks, limits)


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


def plain(value: Any) -> Any:
    """Return the value, or raise TypeError if it contains anything but plain Python data."""
    if isinstance(value, dict):
        plain([*value, *value.values()])
    elif type(value) in (list, tuple, set, frozenset):
        for item in value:
            plain(item)
    elif type(value) not in (type(None), bool, int, float, complex, str, bytes):
        raise TypeError(f"{show(value)} is a {type(value).__name__}, not plain Python data")
    return value


def same(expected: Any, got: Any) -> bool:
    """Return whether types and values are equal, at every level.

    An expected float also accepts an equal int, and NaN equals NaN.
    """
    if type(expected) is float and type(got) in (int, float):
        return got == expected or (got != got and expected != expected)
    if type(expected) is not type(got):
        return False
    if isinstance(expected, list | tuple):
        return len(expected) == len(got) and all(map(same, expected, got))
    if isinstance(expected, dict):
        left, right = ({exact(k): v for k, v in d.items()} for d in (expected, got))
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return exact(expected) == exact(got)


def exact(value: Any) -> Any:
    """Return a hashable key that differs where types differ: {1} and {True} get different keys."""
    if type(value) is tuple:
        return tuple, tuple(map(exact, value))
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(exact, value))
    return type(value), value


def reason_of(test: ProgramTest, answer: tuple[str, Any]) -> str:
    """Return why the answer fails the test, or "" if it passes."""
    kind, got = answer
    if kind == "failed":  # the text may be forged, and an empty one would be a pass
        text = " ".join(got.split())[:300] or "failed"
        return "".join(letter if letter.isprintable() else "?" for letter in text)
    try:
        passes = type(got) is not Opaque and test.holds(got)
    except (TypeError, ValueError, AttributeError, ArithmeticError, RecursionError):  # `None < 3`
        passes = False
    return "" if passes else f"wrong value: got {show(got)}, expected {test.expected}"


def show(value: Any) -> str:
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more than 4,300 digits, or nested without end
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= 120 else text[:117] + "..."
