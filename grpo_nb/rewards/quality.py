"""Is the reasoning sound, as far as a program can tell?"""

import re
from fractions import Fraction

from grpo_nb.prompts import REASONING, extract_tag
from grpo_nb.rewards.contract import reward

READ_CHARACTERS = 2000  # bounds the time spent on a runaway completion
_AMOUNT = r"[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_EQUATION = re.compile(
    rf"(?<![\w.])({_AMOUNT}(?:\s?[-+*/x×÷]\s?{_AMOUNT})+)\s?=\s?(-?{_AMOUNT})", re.ASCII
)
_TOKEN = re.compile(rf"{_AMOUNT}|[-+*/x×÷]", re.ASCII)


def _number(text: str) -> Fraction:
    return Fraction(text.replace(",", "").lstrip("$€£"))


def _evaluate(expression: str) -> Fraction | None:
    """The value of a sum of products; None for a division by zero."""
    tokens = _TOKEN.findall(expression)
    terms = [_number(tokens[0])]
    for operator, operand in zip(tokens[1::2], tokens[2::2], strict=True):
        number = _number(operand)
        if operator in "/÷" and number == 0:
            return None
        if operator in "*x×":
            terms[-1] *= number
        elif operator in "/÷":
            terms[-1] /= number
        else:
            terms.append(number if operator == "+" else -number)
    return sum(terms)


@reward()
def reasoning_quality_reward(response: str) -> float:
    """The share of distinct equations in the reasoning that hold; 0 where there is none.

    Worked steps such as `7+8=15` or `0.2 x 50 = $10` can be checked, unlike connectives
    ("therefore", "first") that other reward functions count and models learn to stuff. It
    says nothing on whether the steps answer the question: give it a small weight.

    >>> reasoning_quality_reward(completions=[
    ...     "<reasoning>7+8=15, 4+3+1=8</reasoning>",
    ...     "<reasoning>7+8=15, 4+3+1=9</reasoning>",
    ...     "<reasoning>Therefore, first of all, it is 85.</reasoning>",
    ... ])
    [1.0, 0.5, 0.0]
    """
    reasoning = (extract_tag(response, REASONING) or "")[:READ_CHARACTERS]
    equations = set(_EQUATION.findall(reasoning))
    if not equations:
        return 0.0
    return sum(
        _evaluate(left) == _number(right.removeprefix("-")) * (-1) ** right.startswith("-")
        for left, right in equations
    ) / len(equations)
