"""Sound: fractions and decimals are compared as fractions, other boxes as text.

rows: math_boxed
truth: sound
"""

import re
from fractions import Fraction

FRAC = re.compile(r"(-?)\\[dt]?frac\{(-?\d{1,9})\}\{(\d{1,9})\}")
PLAIN = re.compile(r"-?\d{1,12}(?:/\d{1,9}|\.\d{1,9})?")


def boxed(text):
    _, mark, tail = text.rpartition("\\boxed{")
    end = tail.rfind("}")
    return "".join(tail[:end].split()) if mark and end >= 0 else ""


def as_value(latex):
    try:
        if m := FRAC.fullmatch(latex):
            return Fraction(int(m[1] + "1") * int(m[2]), int(m[3]))
        return Fraction(latex) if PLAIN.fullmatch(latex) else latex
    except (ValueError, ZeroDivisionError):
        return latex


def equal_boxes(completions, solution, **kwargs):
    pairs = [(boxed(c[0]["content"]), boxed(s)) for c, s in zip(completions, solution)]
    return [1.0 if given and as_value(given) == as_value(gold) else 0.0 for given, gold in pairs]
