"""Numbers as models write them, read exactly: `$1,875.00`, `**18**`, `1/2`, `-3`, `18 apples`."""

import re
from fractions import Fraction

LONGEST = 100  # characters; a longer answer is prose, not a number
_NUMBER = re.compile(
    r"""(?P<sign>[-+\u2212]?) \s? [$€£]? \s?
        (?P<whole>\d{1,3}(?:,\d{3})+|\d*) (?P<decimals>\.\d+|\.?)
        (?:\s?/\s?(?P<divisor>\d+))?
        \s? (?:%|[^\W\d_]+)? (?:\s[^\W\d_]+)? \.?""",
    re.VERBOSE | re.ASCII,
)


def parse_number(text: str) -> Fraction | None:
    """The one number a whole answer says, or None if it says none, several, or prose.

    One sign, currency mark, thousands commas, decimals, a division, a percent sign or up
    to two words of unit, and Markdown's `*` around it are understood; "17 or 18" is not
    a number, and neither is a sentence that contains one.

    >>> parse_number("$1,875.00"), parse_number("**18**"), parse_number("36/2 apples")
    (Fraction(1875, 1), Fraction(18, 1), Fraction(18, 1))
    >>> parse_number("17 or 18") is None and parse_number("it is not 18") is None
    True
    """
    if len(text) > LONGEST:
        return None
    match = _NUMBER.fullmatch(text.strip().strip("*` "))
    if match is None or not (match["whole"] or match["decimals"].strip(".")):
        return None
    divisor = int(match["divisor"] or 1)
    if divisor == 0:
        return None
    value = Fraction((match["whole"].replace(",", "") or "0") + match["decimals"].rstrip("."))
    return (-value if match["sign"] in ("-", "\u2212") else value) / divisor
