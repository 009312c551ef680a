"""What a completion says: its text, tags, answer, and the number in it."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.rewards.forms import TAGS, extract_boxed, extract_hash_answer, extract_tag
from grpo_nb.rewards.numbers import parse_number
from grpo_nb.rewards.prompts import build_prompt, completion_text


def test_a_prompt_without_system_prompt_is_one_user_turn():
    assert build_prompt("2 + 2?", "") == [{"role": "user", "content": "2 + 2?"}]


@given(st.text().filter(lambda text: "answer>" not in text))
def test_what_stands_between_the_tags_is_extracted_and_stripped(inner):
    assert TAGS.extract(f"before<answer>{inner}</answer>after") == inner.strip()


@given(st.text(alphabet="<>/answer 12"))
def test_extraction_never_raises_and_never_returns_a_tag(text):
    TAGS.extract(text)
    inner = extract_tag(text, "answer")
    assert inner is None or ("<answer>" not in inner and "</answer>" not in inner)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", None),
        ("   ", None),
        ("85", "85"),
        ("<answer>85", None),  # opened and never closed: truncated
        ("</answer>85<answer>", None),
        ("<answer>1</answer><answer>2</answer>", "2"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("<answer><answer>1</answer>", "1"),
        ("<answer>1</answer></answer>", "1"),
        (r"<answer>\boxed{85}</answer>", "85"),
        (r"so \boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{85", r"\boxed{85"),
        ("steps\n#### 85", "85"),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_complete_answer_counts(text, answer):
    assert TAGS.extract(text) == answer


def test_a_megabyte_of_tags_is_read_in_linear_time():
    for flood in ("<answer>" * 130_000, "</answer>" * 110_000, "<answer" * 150_000):
        assert extract_tag(flood, "answer") is None
    assert extract_boxed(r"\boxed{" * 150_000) is None
    assert extract_boxed(r"\boxed{" + "{}" * 500_000 + "}") == "{}" * 500_000


def test_every_shape_of_completion_gives_its_text():
    assistant = {"role": "assistant"}
    parts = [{"type": "text", "text": "8"}, {"type": "image"}, {"type": "text", "text": "5"}]
    assert completion_text("85") == "85"
    assert completion_text([assistant | {"content": "85"}]) == "85"
    assert completion_text([assistant | {"content": parts}]) == "85"
    assert completion_text([assistant | {"content": None}]) == ""
    assert completion_text([assistant]) == ""
    assert completion_text([]) == ""


def test_the_last_hash_mark_counts():
    assert extract_hash_answer("#### 1\nno: #### 2") == "2"
    assert extract_hash_answer("####") is None
    assert extract_hash_answer("18") is None


@given(st.integers())
def test_every_integer_is_read_with_and_without_commas(number):
    if len(f"{number:,}") <= 100:
        assert parse_number(str(number)) == number
        assert parse_number(f"{number:,}") == number


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4, min_value=-1e9, max_value=1e9))
def test_decimals_are_read_exactly(number):
    assert parse_number(str(number)) == Fraction(number)


@given(st.text(max_size=200))
def test_no_text_makes_it_raise(text):
    parse_number(text)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", 18),
        (" 18 ", 18),
        ("18.", 18),
        ("18.0", 18),
        (".5", Fraction(1, 2)),
        ("+3", 3),
        ("-3", -3),
        ("−3", -3),  # a typographic minus
        ("$1,875.00", 1875),
        ("-$5", -5),
        ("€ 20", 20),
        ("**18**", 18),
        ("`18`", 18),
        ("36/2", 18),
        ("1 / 4", Fraction(1, 4)),
        ("50%", 50),
        ("18 apples", 18),
        ("18 square meters", 18),
        ("18 apples.", 18),
        ("18 km/h", 18),
        ("18 m^2", 18),
        ("20 €", 20),
        ("１８", 18),
        ("½", Fraction(1, 2)),
        ("1½", Fraction(3, 2)),
        ("1 1/2", Fraction(3, 2)),
        ("1.5/3", Fraction(1, 2)),
        ("1e5", 100_000),
        ("3 x 10^4", 30_000),
        (r"3\times 10^{-2}", Fraction(3, 100)),
        (r"$\dfrac{3}{4}$", Fraction(3, 4)),
        (r"\$1{,}000", 1000),
        (r"18\%", 18),
        (r"18 \text{ cm}^2", 18),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_ways_to_write_a_number(text, number):
    assert parse_number(text) == number


NOT_ONE_NUMBER = " |.|-|$|apples|17 or 18|17 = 18|it is not 18|x = 18|1/0|1,23|1.2.3|--3|1 2"
NOT_ONE_NUMBER += "|5 000|18!|1e999|(18)"


@pytest.mark.parametrize("text", ["", *NOT_ONE_NUMBER.split("|"), "18 cats and dogs", "9" * 101])
def test_what_is_not_one_number(text):
    assert parse_number(text) is None
