"""Correctness rewards.

Numbers are compared as rationals, and prose is never taken for a number. Code runs in the sandbox,
and its results are compared outside of it.
"""

import re
import unicodedata
from collections import Counter
from fractions import Fraction
from typing import Any

from grpo_nb import answers
from grpo_nb.answers.forms import FORMS, TAGS, Form
from grpo_nb.rewards.combine import gated
from grpo_nb.rewards.contract import Scored, reward
from grpo_nb.rewards.format import (
    extract_code,
    no_syntax_error_reward,
    parse_json,
    soft_format_reward,
)
from grpo_nb.rewards.prompts import split_words
from grpo_nb.sandbox.values import same

LONGEST_ANSWER = 2_000  # characters of an answer that are compared as text


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


math_problem_reward = gated(
    numeric_correctness_reward, by=soft_format_reward, name="math_problem_reward"
)


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


@reward(max_none_share=0.05, parallel=True, resists="as code_execution_reward")
def code_generation_reward(response: str, tests: Any, *, form: Form = FORMS["code"]) -> Scored:
    """Pay 1/8 for one block of code, 1/8 if it parses, and 3/4 of the share of passed tests."""
    execution = code_execution_reward.score(response, tests, form=form)
    if execution.score is None:
        return execution
    well_formed = soft_format_reward.score(response, form=form)
    parses = no_syntax_error_reward.score(response, form=form).score
    return Scored(0.125 * (well_formed + parses) + 0.75 * execution.score, execution.reason)
