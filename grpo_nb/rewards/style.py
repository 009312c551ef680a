"""Style rewards: length, worked steps that hold, and no repetition.

A wrong answer can earn all of these rewards: give them small weights, or gate them. Length is
counted in tokens if TRL passes `completion_ids`, and otherwise in words.
"""

import math
import re
from collections.abc import Sequence
from fractions import Fraction

from grpo_nb.answers.forms import TAGS, Form
from grpo_nb.rewards.contract import Scored, reward

READ_CHARACTERS = 20_000  # bounds the time spent on a runaway completion
READ_EQUATION_CHARACTERS = 2_000
_AMOUNT = r"[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
# A sum without a result is matched too, so that it is not searched again from each of its numbers.
_EQUATION = re.compile(
    rf"(?<![\w.])({_AMOUNT}(?:\s?[-+*/x×÷]\s?{_AMOUNT})+)(?:\s?=\s?(-?{_AMOUNT}))?", re.ASCII
)
_STEP = re.compile(rf"([-+*/x×÷]?)\s?({_AMOUNT})", re.ASCII)
Ids = Sequence[int] | None


def _evaluate(expression: str) -> Fraction | None:
    """Return the value of a sum of products; None for a division by zero."""
    total = product = Fraction(0)
    for sign, amount in _STEP.findall(expression):
        number = Fraction(amount.replace(",", "").lstrip("$€£"))
        if sign in ("*", "x", "×"):
            product *= number
        elif sign in ("/", "÷"):
            if number == 0:
                return None
            product /= number
        else:
            total, product = total + product, -number if sign == "-" else number
    return total + product


@reward(needs="reasoning", resists="talk without content: equations are checked, not words")
def reasoning_quality_reward(response: str, *, form: Form = TAGS) -> Scored:
    """Pay the share of the reasoning's distinct equations that are correct; 0 without any.

    Worked steps such as `7+8=15` or `0.2 x 50 = $10` can be checked. The score does not show
    whether the steps answer the question.

    >>> reasoning_quality_reward(completions=[
    ...     "<reasoning>7+8=15, 4+3+1=8</reasoning>",
    ...     "<reasoning>7+8=15, 4+3+1=9</reasoning>",
    ...     "<reasoning>Therefore, first of all, it is 85.</reasoning>",
    ... ])
    [1.0, 0.5, 0.0]
    """
    reasoning = form.reasoning(response)[:READ_EQUATION_CHARACTERS]
    equations = {each for each in _EQUATION.findall(reasoning) if each[1]}
    if not equations:
        return Scored(0.0, "no equation")
    correct = sum(_evaluate(left) == _evaluate(right) for left, right in equations)
    return Scored(correct / len(equations), f"{correct} of {len(equations)} equations hold")


@reward(low=-1.0, high=0.0, resists="loops and repeated sentences")
def no_repetition_penalty(response: str, *, ngram: int = 3) -> float:
    """Take away the share of word n-grams that repeat an earlier n-gram."""
    words = response[:READ_CHARACTERS].casefold().split()
    grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1 if grams else 0.0


def _length(response: str, completion_ids: Ids) -> tuple[int, str]:
    if completion_ids is not None:
        return len(completion_ids), f"{len(completion_ids)} tokens"
    words = len(response.split())
    return words, f"{words} words"


@reward(resists="padding and truncation alike")
def ideal_length_reward(
    response: str, completion_ids: Ids = None, *, ideal: int = 100, tolerance: int = 50
) -> Scored:
    """Pay by the distance to the ideal length: 1 at 0, 0.61 at `tolerance`, 0.14 at twice that.

    The score falls along a bell curve.
    """
    length, unit = _length(response, completion_ids)
    return Scored(math.exp(-(((length - ideal) / tolerance) ** 2) / 2), unit)


@reward(resists="answers without reasoning")
def min_length_reward(response: str, completion_ids: Ids = None, *, minimum: int = 20) -> Scored:
    """Pay the length divided by the minimum, at most 1."""
    length, unit = _length(response, completion_ids)
    return Scored(min(1.0, length / minimum), unit)


@reward(low=-1.0, high=0.0, resists="padding")
def max_length_penalty(response: str, completion_ids: Ids = None, *, maximum: int = 512) -> Scored:
    """Take away the share by which the length exceeds the maximum, at most 1."""
    length, unit = _length(response, completion_ids)
    return Scored(-min(1.0, max(0.0, length / maximum - 1)), unit)
