"""Compare an answer with the reference answer.

Numbers are compared as rational numbers. Sets, tuples and intervals are compared part by part.
math-verify compares other expressions, in a process that can be killed.
"""

import re
from collections.abc import Iterable

from grpo_nb.answers.math_worker import equal_latex
from grpo_nb.answers.read import LONGEST, Answer, bare, read_answer, read_reference

LEAST_DECIMALS = 4
_JUXTAPOSED = re.compile(  # math-verify would read "17 1" as a sum
    r"\d(?:\s|\{\}|\^\{?\\circ\}?|\\(?:[lc]?dots|\w*style|\w+\{\s*\}))+\d"
)
_AS_OFTEN_AS_IN_REFERENCE = [
    r"[=:;]",
    r"\\(?:sum|prod|int|lim|binom|[lc]?dots)(?![A-Za-z])",
    r"['\"$]|boxed|\.\.",
]
_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+")


def compare_answers(
    reference: str, answer: str | None, seconds: float = 0.5
) -> tuple[bool | None, str]:
    r"""Return whether an answer means the same as the reference answer, and the reason.

    Args:
        reference: The reference answer as text, possibly with LaTeX, as `find_answer` returns it.
        answer: The answer in the same form; None if the completion has none.
        seconds: CPU time for one symbolic comparison.

    Returns:
        (verdict, reason). The verdict is False if the answer is wrong or refused, and None if the
        reference cannot be used.

    >>> compare_answers(r"\frac{1}{2}", "the answer is $x = 0.5$")
    (True, 'read as equation x = 0.5')
    >>> compare_answers("18", "17 or 18")
    (False, 'read as set 17 or 18')
    """
    expected, value = read_reference(reference), read_answer(answer or "")
    if value.kind == expected.kind == "number":
        return same_number(expected, value), f"read as number {value.text}"
    if answer and len(answer) < 4 * LONGEST and bare(reference) == bare(answer) != "":
        return True, "written as the reference is"
    if fault := unusable(expected, seconds):
        return None, f"the reference answer {reference!r} cannot be used: {fault}"
    if not value.kind:
        return False, f"refused: {value.reason}"
    return _same(expected, value, seconds), f"read as {value.kind} {_latex(value.text)}"


def unusable(expected: Answer, seconds: float = 0.5) -> str:
    """Return why the reference can match only its own text; "" if it can match other texts."""
    nameless = expected.kind == "equation" and not expected.name
    if nameless or expected.kind in ("expression", "inequality"):
        parsed = equal_latex(_latex(expected.text), "", seconds) is not None
        return "" if parsed else "math-verify cannot parse it"
    return expected.reason or next(
        filter(None, (unusable(part, seconds) for part in expected.parts)), ""
    )


def _same(expected: Answer, answer: Answer, seconds: float) -> bool | None:
    if bare(expected.text) == bare(answer.text):
        return True
    kinds = {expected.kind, answer.kind}
    lists = expected.parts and answer.parts
    if expected.number is not None and answer.number is not None and not lists:
        return same_number(expected, answer)
    if kinds == {"set", "inequality"}:
        return False  # math-verify would accept {0, 1} for (0, 1)
    if "inequality" in kinds:  # an interval may equal an inequality
        return _symbolic(expected.text, answer.text, seconds)
    if "equation" in kinds:
        return _same_equation(expected, answer, seconds)
    if lists:
        return _same_parts(expected, answer, seconds)
    if "text" in kinds:
        return _letters(expected.text) == _letters(answer.text) != ""
    if answer.parts:
        return False
    return _symbolic(expected.text, answer.text, seconds)


def same_number(expected: Answer, answer: Answer) -> bool:
    """Return whether two numbers are equal; a percentage equals its decimal form (50 % and 0.5).

    A reference without a finite decimal form, such as 1/3, also matches a correctly rounded decimal
    with at least LEAST_DECIMALS decimal places.
    """
    left, right = expected.number, answer.number
    if left == right:
        return True
    percent = expected.text.endswith("%") - answer.text.endswith("%")
    if percent and left * 10**-percent * 10**-percent == right:
        return True
    places = len(match[1]) if (match := re.search(r"\.(\d+)$", answer.text)) else 0
    endless = 10**40 % left.denominator
    return bool(endless and places >= LEAST_DECIMALS and abs(left - right) * 10**places <= 0.5)


def _same_equation(expected: Answer, answer: Answer, seconds: float) -> bool | None:
    """Compare values if the names match or only one text is an equation; else ask math-verify."""
    if answer.kind != "equation" and not (expected.name or len(expected.parts) > 2):
        # The reference |AB| = 1 accepts 1, but 2x + 3y = 6 does not accept 6.
        return _symbolic(expected.text, answer.text, seconds)
    target = expected.parts[-1] if expected.kind == "equation" else expected
    one_name = bare(expected.name) == bare(answer.name) != ""
    if expected.kind != answer.kind or one_name:
        values = answer.parts if answer.kind == "equation" else [answer]
        return _all(_same(target, value, seconds) for value in values)
    return _symbolic(expected.text, answer.text, seconds)


def _same_parts(expected: Answer, answer: Answer, seconds: float) -> bool | None:
    """Compare sets in any order, but tuples, intervals and values without names one by one."""
    left, right = expected.parts, list(answer.parts)
    several = len({part.name for part in left if part.name}) > 1  # k = 45, n = 2
    brackets = [one.kind == "set" or one.shape for one in (expected, answer)]
    is_loose = several and answer.shape == "()"  # the values alone, in order
    if len(left) != len(right) or (brackets[0] != brackets[1] and not is_loose):
        return False
    if brackets != [True, True] or (several and not any(part.name for part in right)):
        return _all(_same(one, other, seconds) for one, other in zip(left, right, strict=True))
    for one in left:
        match = next((other for other in right if _same(one, other, seconds)), None)
        if match is None:
            return False
        right.remove(match)
    return True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    return next((verdict for verdict in verdicts if not verdict), True)


def _letters(text: str) -> str:
    return re.sub(r"\\text|[\W_]", "", text).casefold()


def _symbolic(reference: str, answer: str, seconds: float) -> bool | None:
    """Compare with math-verify; an answer with words or signs that the reference lacks is wrong."""
    expected, text = _latex(reference), _latex(answer)
    bases = [len(re.findall(r"\d\s*_", one)) for one in (expected, text)]  # 204 in base 5
    if _JUXTAPOSED.search(text) or bases[0] != bases[1]:
        return False
    marks = _AS_OFTEN_AS_IN_REFERENCE
    if any(len(re.findall(mark, text)) > len(re.findall(mark, expected)) for mark in marks):
        return False
    letters, allowed = (_COMMAND.sub(" ", one) for one in (text, expected))
    words = re.findall(r"[^\W\d_]{2,}", letters)  # "xy" is a product if the reference has x and y
    return all(set(word) <= set(allowed) for word in words) and equal_latex(expected, text, seconds)


def _latex(text: str) -> str:
    r"""Return the text for math-verify, with LaTeX's braces and with 1e-5 as a power of ten."""
    text = text.replace("⦃", r"\{").replace("⦄", r"\}")
    return re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"\\cdot 10^{\1}", text)
