"""Numbers as models write them, read exactly: `$1,875.00`, `**18**`, `1 1/2`, `18 apples`."""

import re
import unicodedata
from fractions import Fraction

LONGEST = 100  # characters; a longer answer is prose, not a number
LARGEST_EXPONENT = 300
_INTEGER = re.compile(r"-?[0-9]{1,40}")
_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?) \s? [$€£¥]? \s?
        (?:(?P<mixed>\d+)\s(?=\d+\s?/))?
        (?P<value>{_UNSIGNED})
        (?:\s?/\s?(?P<divisor>{_UNSIGNED}))?
        (?:(?:[eE]|\s?[x×*]\s?10\s?\^?\s?)(?P<exponent>[-+]?\d+))?
        \s? (?:[%$€£¥]|°?[^\W\d_]+(?:\^?[23])?(?:/[^\W\d_]+)?)? (?:\s[^\W\d_]+)? \.?""",
    re.VERBOSE | re.ASCII,
)
_LATEX = (
    (re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}"), r" \1/\2"),
    (re.compile(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"10\^\{([-+]?\d+)\}"), r"10^\1"),
    (re.compile(r"\{,\}|\\[,!]"), ","),
    (re.compile(r"\\times|\\cdot"), "×"),
    (re.compile(r"\\([$%;: ])"), r"\1"),
)


def plain(text: str) -> str:
    """The text in plain ASCII digits, without LaTeX or Markdown around a number.

    >>> plain("１８"), plain(r"$\\frac{1}{2}$"), plain("−3"), plain("1½")
    ('18', '1/2', '-3', '1 1/2')
    """
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)
    text = unicodedata.normalize("NFKC", text).replace("\u2212", "-").replace("\u2044", "/")
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    text = text.replace("**", "").replace("`", "").strip("*_ \n\t")
    if len(text) > 1 and text[0] == text[-1] == "$":
        text = text[1:-1]
    return " ".join(text.strip("*_ ").split())


def parse_number(text: str) -> Fraction | None:
    """The one number a whole answer says, exactly; None if it says none, several, or prose.

    One sign, currency mark, thousands commas, decimals, a division, a mixed number, a power
    of ten, a percent sign or up to two words of unit, and Markdown or LaTeX around it are
    understood. "17 or 18" is not a number, and neither is a sentence that contains one.
    A percentage is its number: 50 % is 50.

    >>> parse_number("$1,875.00"), parse_number("**18**"), parse_number("36/2 apples")
    (Fraction(1875, 1), Fraction(18, 1), Fraction(18, 1))
    >>> parse_number("1 1/2"), parse_number("1.5e3")
    (Fraction(3, 2), Fraction(1500, 1))
    >>> parse_number("17 or 18") is None and parse_number("it is not 18") is None
    True
    """
    if len(text) > LONGEST:
        return None
    if _INTEGER.fullmatch(text):  # most expected and answers: ten times as fast
        return Fraction(int(text))
    match = _NUMBER.fullmatch(plain(text))
    if match is None:
        return None
    exponent = int(match["exponent"] or 0)
    divisor = Fraction((match["divisor"] or "1").replace(",", ""))
    if divisor == 0 or abs(exponent) > LARGEST_EXPONENT:
        return None
    value = Fraction(match["value"].replace(",", "")) / divisor + int(match["mixed"] or 0)
    value *= Fraction(10) ** exponent
    return -value if match["sign"] == "-" else value
