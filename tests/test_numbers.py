from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb.rewards.numbers import parse_number


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
