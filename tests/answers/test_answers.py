"""What counts as an answer: where it stands, what it says, what equals it."""

from fractions import Fraction

import pytest
from answer_rules import RIGHT, WRONG, rows
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.answers import compare_answers, extract_tag, find_answer, parse_number, read_answer


@pytest.mark.parametrize(("rule", "reference", "answer"), rows(RIGHT))
def test_right_answers_as_models_write_them(rule, reference, answer):
    assert compare_answers(reference, answer)[0] is True, rule
    assert compare_answers(reference, f"The answer is ${reference}$.")[0] is True


@pytest.mark.parametrize(("rule", "reference", "answer"), rows(WRONG))
def test_what_earns_nothing(rule, reference, answer):
    assert compare_answers(reference, answer)[0] is False, rule


UNUSABLE = ["", "  ", r"\frac{1}{", "1 +", "{" * 30, "9^{9^{9^{9}}}", "7" * 501, "x" * 10**6]


@pytest.mark.parametrize("reference", UNUSABLE)
def test_a_reference_that_cannot_be_used_gives_none_whatever_the_answer(reference):
    for answer in ("18", "17 or 18"):
        verdict, reason = compare_answers(reference, answer)
        assert verdict is None and "cannot be used: " in reason


SAID = {  # completion: its answer
    "<answer>85": None,
    "<answer>1</answer><answer>2</answer>": "2",
    r"\boxed{1} </think> so \boxed{\frac{1}{2}}.": r"\frac{1}{2}",
    r"$x = \boxed{1}$ or $x = \boxed{2}$": r"\boxed{1}, \boxed{2}",
    r"\boxed{1}? No: \boxed{2}": r"\boxed{1}? No: \boxed{2}",
    r"first \boxed{3}. The answer is $5$.": "5",
    r"\boxed{\phantom{0}} is 4, so the answer is \(\boxed{4}\).": r"\(\boxed{4}\).",
    "a 1.\n**Final Answer**\n2. I hope it is right.": "2",
    "Answer: 5 pears. Wait, 6.": "5 pears. Wait, 6.",
    "steps #### 1\n#### 85": "85",
    "It is 3 + 4. Therefore, there are 7 pears in it.": "7",
    "3 or 4 of them": "3 or 4 of them",
    **dict.fromkeys(["", "   ", "####"]),
}


@pytest.mark.parametrize("text", SAID)
def test_where_a_completion_says_its_answer(text):
    assert find_answer(text) == SAID[text]


NOT_3 = (
    "$3-i$|3-i|$3 n$|3 n|3 pi|n + 3|n3|3^n|2 of the 3|3!|the 3rd|3/n|-3|3 and a half|not 3|x > 3"
)
NOT_3 += "|3 or so. Or 4|$2$ or $3$|log 3|$3$ n|$3$-i|$3$ pi|n $3$|-$3$|$3$!|$3$ (or 4)|$3$n"


@pytest.mark.parametrize("text", NOT_3.split("|"))
def test_a_number_in_a_sentence_is_read_alone_only_where_nothing_else_is_said(text):
    for said in (f"Final Answer: {text}", f"The answer is {text}.", f"Therefore, it is {text}"):
        assert compare_answers("3", find_answer(said))[0] is False


def test_the_reason_says_what_was_read_and_how_it_was_compared():
    said = "read as equation x = 5"
    assert compare_answers("5", "so $x = 5$") == (True, said)
    assert compare_answers("(1,2)", "(1,3)") == (False, "read as tuple (1,3)")
    assert compare_answers("x+1", "x-1")[1] == "read as expression x-1"
    assert compare_answers("18", "it is not 18")[1] == "refused: it denies or hedges ('not')"
    assert compare_answers("18", None) == (False, "refused: it is empty")


@pytest.mark.parametrize(
    "flood", ["(", "$", "x=", "1,", "is ", "½", "answer is ", r"\boxed{1} ", "ab'", "**"]
)
def test_a_megabyte_is_read_in_linear_time(flood):
    text = flood * (1_000_000 // len(flood))
    short = f"The answer is $1$ {text[:1900]}#"  # which is read, while the others are too long
    for written in (text, f"<answer>{text}</answer>", f"<answer>{text}", short):
        assert not compare_answers("x+1", find_answer(written))[0]


DECIMALS = st.decimals(
    allow_nan=False, allow_infinity=False, places=4, min_value=-1e9, max_value=1e9
)


@given(DECIMALS | st.integers(-(10**70), 10**70))
def test_numbers_are_read_exactly_with_and_without_commas(number):
    assert parse_number(str(number)) == parse_number(f"{number:,}") == Fraction(number)


@given(st.text(max_size=200) | st.text(alphabet="<>/answer 12"))
def test_no_text_makes_it_raise(text):
    read_answer(text), find_answer(text), parse_number(text)
    inner = extract_tag(text, "answer")
    assert inner is None or ("<answer>" not in inner and "</answer>" not in inner)


NOT_ONE_NUMBER = " |.|-|$|apples|17 or 18|17 = 18|it is not 18|x = 18|1/0|1,23|1.2.3|--3|1 2"
NOT_ONE_NUMBER += "|18!|1e999|(18)|2n|3x|3m|2pi|18 thousand"


@pytest.mark.parametrize("text", ["", *NOT_ONE_NUMBER.split("|"), "18 cats and dogs", "9" * 101])
def test_what_is_not_one_number(text):
    assert parse_number(text) is None
