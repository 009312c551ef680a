"""Hold the reward library: correctness, format, length and style.

Numbers are compared as rationals, and prose is never taken for a number. Code runs in the sandbox,
and its results are compared outside of it. A wrong answer can earn all rewards for format, length
and style: give them small weights, or gate them. Length is counted in tokens if TRL passes
`completion_ids`, and otherwise in words.
"""

import ast
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_nb import answers
from grpo_nb.answers.forms import FORMS, TAGS, Form, fenced_blocks
from grpo_nb.rewards.contract import Scored, reward
from grpo_nb.rewards.prompts import split_words
from grpo_nb.sandbox.values import same

LONGEST_ANSWER = 2_000  # characters of an answer that are compared as text
READ_CHARACTERS = 20_000  # bounds the time spent on a runaway completion
READ_EQUATION_CHARACTERS = 2_000
_AMOUNT = r"[$€£]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
# A sum without a result is matched too, so that it is not searched again from each of its numbers.
_EQUATION = re.compile(
    rf"(?<![\w.])({_AMOUNT}(?:\s?[-+*/x×÷]\s?{_AMOUNT})+)(?:\s?=\s?(-?{_AMOUNT}))?", re.ASCII
)
_STEP = re.compile(rf"([-+*/x×÷]?)\s?({_AMOUNT})", re.ASCII)
Ids = Sequence[int] | None


def _answer(response: str, form: Form) -> str:
    return (form.extract(response) or "")[:LONGEST_ANSWER]


def normalize(text: str) -> str:
    """Return the text in lower case, with plain digits and single spaces, without a final period.

    >>> normalize(" **Paris**. ")
    'paris'
    """
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-")
    text = re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}|\*\*|`", r"\1", text)
    return " ".join(text.strip("*_$ \n\t").rstrip(".").strip("*_$ ").split()).casefold()


@reward(max_none_share=0.05, resists="answers in several tags: the last one counts")
def exact_match_reward(response: str, answer: str, *, form: Form = TAGS) -> float | None:
    """Pay 1 if the final answer is the reference answer, up to case, spacing and a final period."""
    expected = normalize(answer)
    return float(normalize(_answer(response, form)) == expected) if expected else None


@reward(max_none_share=0.05, resists="long answers that contain the right one: all is compared")
def fuzzy_match_reward(
    response: str, answer: str, *, threshold: float = 0.6, form: Form = TAGS
) -> float | None:
    """Pay the similarity to the reference answer (rapidfuzz ratio), or 0 below the threshold."""
    from rapidfuzz import fuzz

    if not (expected := normalize(answer)):
        return None
    ratio = fuzz.ratio(normalize(_answer(response, form)), expected) / 100
    return ratio if ratio >= threshold else 0.0


@reward(max_none_share=0.05, resists="lists of candidates, prose that contains the number")
def numeric_correctness_reward(
    response: str,
    answer: str,
    *,
    absolute: float = 0.0,
    relative: float = 0.0,
    form: Form = TAGS,
) -> Scored:
    """Pay 1 if the final answer is the reference number, exactly or within a tolerance.

    The whole answer has to be one number: "17 or 18" earns nothing. If the reference answer is not
    a number, the score is None.

    >>> completions = ["<answer>18.0</answer>", "<answer>17 or 18</answer>", "#### 18"]
    >>> numeric_correctness_reward(completions=completions, answer=["18"] * 3)
    [1.0, 0.0, 1.0]
    """
    expected = answers.read_reference(answer)
    value = answers.read_answer(form.extract(response) or "")
    if expected.kind != "number":
        return Scored(None, f"the reference answer {answer!r} is not a number")
    if value.kind != "number":
        return Scored(0.0, value.reason or f"the answer is not a number, but read as {value.kind}")
    right = answers.same_number(expected, value)
    if not right and (absolute or relative):
        allowed = max(Fraction(absolute), Fraction(relative) * abs(expected.number))
        right = abs(value.number - expected.number) <= allowed
    verdict = "is" if right else "is not"
    return Scored(float(right), f"{value.text}, read as a number, {verdict} {expected.text}")


@reward(max_none_share=0.05, parallel=True, resists="relations, alternatives and partial parses")
def math_verify_reward(
    response: str, answer: str, *, timeout_seconds: float = 0.5, form: Form = TAGS
) -> Scored:
    """Pay 1 if the final answer is mathematically equal to the reference answer.

    Numbers are compared exactly, and sets, tuples and intervals part by part. math-verify compares
    the rest, in a process that can be killed. The reason describes what was parsed.

    Source: https://github.com/huggingface/Math-Verify.
    """
    verdict, reason = answers.compare_answers(answer, form.extract(response), timeout_seconds)
    return Scored(None if verdict is None else float(verdict), reason)


@reward(resists="copying the source, stuffing words: precision counts as much as recall")
def overlap_reward(response: str, answer: str, *, form: Form = TAGS) -> float:
    """Pay the F1 score of the words that the final and the reference answer share (ROUGE-1)."""
    words, expected = Counter(split_words(_answer(response, form))), Counter(split_words(answer))
    shared = (words & expected).total()
    return 2 * shared / (words.total() + expected.total()) if shared else 0.0


@reward(resists="naming several options: only a lone letter counts")
def multiple_choice_reward(response: str, answer: str, *, form: Form = TAGS) -> float:
    """Pay 1 if the final answer is the right letter, bare or as "(B)", "B." or "B) text"."""
    letter = re.match(r"\W*([A-Za-z])(?:[).:\s]|$)", _answer(response, form))
    others = re.findall(r"\b(?:or|and)\b\W*[A-Z]\b", _answer(response, form))
    return float(bool(letter) and not others and letter[1].upper() == answer.strip(" ().").upper())


@reward(resists="what the environment's own tests resist; see its findings in notebook 2")
def environment_reward(response: str, environments: Any) -> float:
    """Pay the score in [0, 1] that the environment's `get_reward` returns for the episode.

    Args:
        response: The model's last message.
        environments: The environment instance of the episode, created by us or by TRL.
    """
    return environments.get_reward()


@reward(resists="bare scalars, NaN, extra fields")
def json_fields_reward(response: str, answer: str, *, form: Form = TAGS) -> Scored:
    """Pay the share of the reference object's fields that the answer has with equal values.

    An extra field costs as much as a missing one.
    """
    expected = parse_json(answer)
    try:
        value = parse_json(_answer(response, form))
    except ValueError as error:
        return Scored(0.0, f"not JSON: {error}")
    if not isinstance(value, dict):
        return Scored(0.0, "not a JSON object")
    right = sum(key in value and same(field, value[key]) for key, field in expected.items())
    return Scored(right / max(1, len(expected.keys() | value.keys())))


@reward(
    max_none_share=0.05, parallel=True, resists="printed verdicts, early exit, patched equality"
)
def code_execution_reward(
    response: str, tests: Any, *, seconds: float = 2.0, partial: bool = True, form: Form = TAGS
) -> Scored:
    """Pay the share of the tests that the code passes; `partial=False` pays all or nothing.

    The code is the last fenced block, or else the marked answer. The column `tests` contains calls
    with expected values, or asserts, in a format that `sandbox.run_tests` accepts.
    """
    from grpo_nb.sandbox import Limits, run_tests

    code = extract_code(response, form)
    if not code:
        return Scored(0.0, "no code in a fenced block or in the marks of the answer")
    verdict = run_tests(code, tests, limits=Limits(seconds=seconds))
    if verdict.failure:
        return Scored(None, verdict.failure)
    reason = next(filter(None, verdict.reasons), "")
    return Scored(verdict.share if partial else float(verdict.share == 1), reason)


@reward(needs="marks", resists="empty or repeated marks, the wrong order, marks of other forms")
def soft_format_reward(response: str, *, form: Form = TAGS) -> float:
    """Pay 1 if every mark of the form occurs once, in order, around some text.

    White space does not matter. A box or a block of code may have prose around it; tags may not.

    >>> soft_format_reward(completions=[
    ...     "<reasoning>7+8=15</reasoning> <answer>15</answer>",
    ...     "<reasoning></reasoning><answer>15</answer>",
    ... ])
    [1.0, 0.0]
    """
    return float(form.is_well_formed(response))


@reward(needs="marks", resists="stuffing: a repeated mark earns nothing")
def incremental_format_reward(response: str, *, form: Form = TAGS) -> float:
    """Pay the share of the form's marks (a quarter for each tag) that occur once, in order.

    In this way, a model that does not write the form yet can learn it mark by mark.

    >>> incremental_format_reward(completions=["<reasoning>a</reasoning>", "</answer>" * 9])
    [0.5, 0.0]
    """
    return form.progress(response)


def extract_code(text: str, form: Form = TAGS) -> str | None:
    """Return the last fenced block of the marked answer, or of the text if no answer is marked.

    If there is no fenced block, or if the form is a fenced block, return the marked answer.

    >>> extract_code("```python\\nx = 1\\n```"), extract_code("<answer>x = 1</answer>")
    ('x = 1', 'x = 1')
    """
    answer = form.marked(text)
    blocks = fenced_blocks(answer or text)
    return answer if form.kind == "code" or not blocks else blocks[-1][1]


@reward(resists="code in prose: only a fenced block or the marks of the answer are read")
def no_syntax_error_reward(response: str, *, form: Form = TAGS) -> Scored:
    """Pay 1 if the code is valid Python with more than expressions and `pass`. It is not run."""
    code = extract_code(response, form)
    if not code or len(code) > 100_000:
        return Scored(0.0, "no code" if not code else "longer than 100,000 characters")
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return Scored(0.0, f"{type(error).__name__}: {error}")
    return Scored(float(any(not isinstance(node, ast.Expr | ast.Pass) for node in body)))


def parse_json(text: str) -> Any:
    """Parse text that is one JSON value, with or without a Markdown fence.

    Raises:
        ValueError: The text is not JSON, or contains NaN or Infinity, which JSON lacks.
    """
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*?)\n?```", text.strip(), flags=re.DOTALL)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(fenced[1] if fenced else text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


@reward(resists="bare scalars (`1`, `NaN`), empty objects")
def json_format_reward(response: str, *, form: Form = TAGS) -> Scored:
    """Pay 1 if the final answer is a JSON object or array that is not empty."""
    try:
        value = parse_json(form.extract(response) or "")
    except ValueError as error:
        return Scored(0.0, f"not JSON: {error}")
    return Scored(float(isinstance(value, dict | list) and bool(value)))


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


@reward(max_none_share=0.05, parallel=True, resists="as code_execution_reward")
def code_generation_reward(response: str, tests: Any, *, form: Form = FORMS["code"]) -> Scored:
    """Pay 1/8 for one block of code, 1/8 if it parses, and 3/4 of the share of passed tests."""
    execution = code_execution_reward.score(response, tests, form=form)
    if execution.score is None:
        return execution
    well_formed = soft_format_reward.score(response, form=form)
    parses = no_syntax_error_reward.score(response, form=form).score
    return Scored(0.125 * (well_formed + parses) + 0.75 * execution.score, execution.reason)


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
