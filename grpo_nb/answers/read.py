r"""Parse the text of an answer into a value.

    $x = \frac12$     an equation of x, whose value is the number 1/2
    (1, 2]            an interval
    17 or 18          a set of two numbers

Precision comes first: text that negates an answer, hedges, or cannot be parsed completely is
refused with a reason.
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grpo_nb.answers.find import HEDGE, NAME, PLAIN_WORD, READ, boxes_of, find_answer

LONGEST, DEEPEST = 500, 20  # characters of an answer; levels of nested brackets
LARGEST_EXPONENT = 300


class Answer(NamedTuple):
    """Hold the value of an answer; for a refused answer, `kind` is "" and `reason` is set."""

    kind: str  # number, expression, set, tuple, interval, equation, inequality, text
    text: str = ""  # normalized
    number: Fraction | None = None
    parts: tuple["Answer", ...] = ()  # members; or sides of an equation, except its name
    shape: str = ""  # the brackets around the parts
    name: str = ""  # "x" for x = 5
    reason: str = ""


_SIGNS = {"−": "-", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", r"\$": "$"}
_SIGNS |= {"√": r"\sqrt ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "≈": r"\approx "}
_SIGNS |= {"²": "^2", "³": "^3", "°": r"^\circ ", r"\lt": "<", r"\gt": ">", r"\{": "⦃", r"\}": "⦄"}
_SIGNS |= {r"\lbrace": "⦃", r"\rbrace": "⦄", r"\dfrac": r"\frac", r"\tfrac": r"\frac"}
_SIGNS |= dict.fromkeys(("≤", "<=", r"\leq", r"\leqslant"), r"\le ") | {r"\cfrac": r"\frac"}
_SIGNS |= dict.fromkeys(("≥", ">=", r"\geq", r"\geqslant"), r"\ge ")
_SIGNS |= dict.fromkeys(("≠", "!=", r"\neq"), r"\ne ")
_SIGN = re.compile(r"\\[A-Za-z]+|" + "|".join(re.escape(s) for s in _SIGNS if not s[1:].isalpha()))
_SPELLINGS = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=\d)\s*,\s*\\!\s*(?=\d{3})", ","),
        (r"\\(?:left|right|[bB]ig+[lr]?|displaystyle|limits)(?![A-Za-z])\.?|(?<!\\)\\!|\*\*|`", ""),
        (r"\\(?:begin|end)\{(?:align|equation|gather)\*?\}", " "),
        (r"[\[(]\s*\\begin\{array\}(?:\{[lcr|]*\})?(.*?)\\end\{array\}\s*[\])]",
         r"\\begin{pmatrix}\1\\end{pmatrix}"),
        (r"\\frac\s*(\d)\s*(\d|\{\d+\})", r"\\frac{\1}{\2}"),
        (r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d{3})", ","),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad", " "),
        (r"\\(?:text[a-z]*|mathrm|mathbf|mbox|operatorname\*?)\s*\{", r"\\text{"),
        (r"\\%|(?<=[\d}$])\s*(?:\\text\{)?\s*(?:percent(?:age)?|pct)\b\}?", "%"),
        (r"sqrt\s?\(([^()]*)\)", r"sqrt{\1}"),
        (r"(?<![\\A-Za-z])(pi|sqrt|sin|cos|tan|log|ln|exp|infty|cup)(?![A-Za-z])", r"\\\1 "),
    )
]  # fmt: skip
_HEAVY = re.compile(
    r"""\d{101} | \^\s*\{[^{}^]*[\d)]\s*\^ | \^\s*\d+\s*\^ | \^\s*\{?\s*\d{5}   # x^{9^9}, x^{99999}
    | \^\s*\{[^{}]*! | (?:\d{4}|[!}])\s*!(?!=) | \([^()]*(?:!|\d{3}|\^)[^()]*\)\s*! """,
    re.VERBOSE,
)
_INNERMOST = re.compile(r"[(\[{⦃][^()\[\]{}⦃⦄]*[)\]}⦄]")


def spelled(text: str) -> str:
    """Normalize LaTeX, Unicode and white space in the text, and drop a final full stop.

    Raises:
        ValueError: The text is too long, its value is too large to compute, or its brackets do not
            match or are nested too deeply.
    """
    text = re.sub(r"(?<=\d)(?=[\u00bc-\u00be\u2150-\u215e])", " ", text)
    if r"\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z{}()\[\]])", r"\\", text)
    text = _SIGN.sub(lambda sign: _SIGNS.get(sign[0], sign[0]), text)
    text = unicodedata.normalize("NFKC", text).replace("\u2044", "/")
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    rest = text = " ".join(text.split()).strip("*_ ").rstrip(". ")
    for _ in range(DEEPEST):
        rest = _INNERMOST.sub("", rest)
    # An interval may open and close with different brackets, so only their counts must agree.
    if re.search(r"[()\[\]{}⦃⦄]", rest):
        raise ValueError("its brackets are unbalanced or nested too deeply")
    if _HEAVY.search(text):
        raise ValueError("it is too large to compute")
    return text


_SET_EQUAL = re.compile(rf"{NAME}\s*(?:=|\\in|\\approx)\s*(?=□)")
_MATH = re.compile(
    r"\$\$(.+?)\$\$|(?<!\\)\$((?:[^$\n\\]|\\.)+?)\$|\\\(([^\n]+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_COPULA = re.compile(
    r"(?s)([^\d\\$=<>^{}]*(?:\b(?:is|are|was|be|equals?|equal to|gives?|get|have|find|obtain)\b:?"
    r"|:\s)|\s*(?:so|thus|then|therefore|hence|answer)\b,?)\s*(.+)",
    re.IGNORECASE,
)
_TAIL = re.compile(r"(?s)(.+?)\s+(?:is|are) (?:the|our|a|its|all)\b[A-Za-z ]*")
_BESIDE = re.compile(  # mathematics, not words
    r"[\d\\^=+/<>|{}\[\]_!]|[-*]\s*□|□\s*[-*(]|(?<![A-Za-z])[b-zB-HJ-Z]\s*□"
)
_AFTER = re.compile(rf"\s*(?:%|pct)?(?:[\s().,;:\"*$]|(?<![A-Za-z'’-]){PLAIN_WORD})*")


def statement(text: str) -> str:
    r"""Return the mathematics of a statement, without the boxes, dollar signs and words around it.

    >>> statement(r"so it follows that $k = \frac13$."), statement("the answer is 18")
    ('k = \\frac13', '18')

    Raises:
        ValueError: The statement names several candidates, negates one, or hedges.
    """
    text = text.replace(r"\"", "").strip(" \t\n*")
    if boxes := boxes_of(text):
        values = [text[start:end] for start, end in boxes]
        for start, end in reversed(boxes):
            text = f"{text[: text.rindex(chr(92), 0, start - 5)]}□{text[end + 1 :]}"
        outside = re.sub(r"\\[()\[\]]|\$", "", text)
    elif spans := [next(filter(None, span.groups())).strip() for span in _MATH.finditer(text)]:
        values = [span for span in spans if not re.fullmatch(NAME, span)] or spans[-1:]
        marks = iter("□" if span in values else "" for span in spans)
        outside = _MATH.sub(lambda _: next(marks), text)
        if re.search(r"\d", outside) and all(re.fullmatch(NAME, span) for span in spans):
            return _without_words(_MATH.sub("it", text))
    else:
        return _without_words(text)
    outside = _SET_EQUAL.sub("", outside)
    before, *between, after = outside.split("□")
    joined = all(_AND.fullmatch(words) for words in between) and _AFTER.fullmatch(after)
    if _BESIDE.search(outside) or not joined:
        raise ValueError("it gives more than one answer")
    return _not_hedged(", ".join(values), before + after) + ("%" if _PERCENT.match(after) else "")


_PERCENT = re.compile(r"\s*(?:%|percent|pct)")
_AND = re.compile(r"[\s,;.]*(?:\b(?:and|or)\b)?[\s,;.]*")


def _without_words(text: str) -> str:
    """Return the value after the last "is" or ":" in text without boxes or math delimiters."""
    value, words = text, ""
    while copula := _COPULA.fullmatch(value):
        value, words = copula[2], words + copula[1]
    if tail := _TAIL.fullmatch(value):
        value, words = tail[1], words + text[-len(value) + tail.end(1) :]
    return _not_hedged(value, text if re.search(r"\d", value) else words)


def _not_hedged(value: str, words: str) -> str:
    if hedge := HEDGE.search(words):
        raise ValueError(f"it denies or hedges ({hedge[0]!r})")
    return value


_UNSIGNED = r"(?:[1-9]\d{0,2}(?:,\d{3})+|[1-9]\d{0,2}(?:[ ]\d{3})+|\d+)(?:\.\d*)?|\.\d+"
_UNIT = (
    r"mm|cm|dm|km|in|ft|yd|mi|mg|kg|lbs?|oz|ml|cl|min|hrs?|sec|ms|mph|kph|Hz|USD|EUR|GBP|rad|deg"
)
_NUMBER = re.compile(
    rf"""(?P<sign>[-+]?) \s? [$€£¥]? \s?
        (?:(?P<mixed>\d+)\s(?=\d+\s?/))?
        (?P<value>{_UNSIGNED})
        (?:\s?/\s?(?P<divisor>{_UNSIGNED}))?
        (?:(?:[eE]|\s?(?:[x*]|\\times|\\cdot)\s?10\s?\^\s?\{{?)(?P<exponent>[-+]?\d+)\}}?)?
        (?P<unit> \s?(?:[%$€£¥]|\^\{{?\s?\\circ\s?\}}?\s?[CF]?
            |(?:{_UNIT}|(?P<short>[mgshlL]))(?:\^?\{{?[23]\}}?)?(?:/(?:{_UNIT}|[hsmgl]))?(?![A-Za-z])
            |\\text\{{(?P<label>[^{{}}]*)\}}(?:\^?\{{?[23]\}}?)?)?
        (?:\s(?P<words>(?:\w+[ ]?){{1,2}}))?)""",
    re.VERBOSE | re.ASCII,
)
_LABEL = re.compile(r"(?i)\s*(?:[a-z()/.-]+\s*){0,2}")  # a unit or a name: two words at most
_WORD = re.compile(r"(?!pi$|sin$|cos$|tan$|log$|exp$|mod$)[A-Za-z]{3,}|a")
_FRACTION = re.compile(r"\\frac\s?\{(\d+)\}\s?\{(\d+)\}(?!\s*\d)")
_COMMA = re.compile(r"([-+]?\d+),(\d+)(?:\s?[$€£%]?(?:\s[a-z]+)?)?")


def parse_number(text: str) -> Fraction | None:
    r"""Return the exact number that a reference answer states; None if it is not one number.

    A sign, a currency mark, thousands separators, decimals, a division, a mixed number, a power
    of ten, a percent sign and a unit are understood. A unit is one of a fixed list, `\text{…}`, or
    up to two words of at least three letters. `2n`, `3m` and `5!` are not numbers. 50 % is 50.

    >>> parse_number("$1,875.00"), parse_number("**18**"), parse_number("36/2 apples")
    (Fraction(1875, 1), Fraction(18, 1), Fraction(18, 1))
    >>> parse_number("1 1/2"), parse_number("1.5e3"), parse_number("2n"), parse_number("17 or 18")
    (Fraction(3, 2), Fraction(1500, 1), None, None)
    """
    answer = read_reference(text)
    return answer.number if answer.kind == "number" else None


def _number(text: str, reference: bool) -> Fraction | None:
    match = _NUMBER.fullmatch(_FRACTION.sub(r" \1/\2", text).strip())
    if match is None or (reference and match["short"]) or HEDGE.search(match["unit"]):
        return None
    if not _LABEL.fullmatch(match["label"] or ""):
        return None
    if not all(map(_WORD.fullmatch, (match["words"] or "").split())):
        return None
    exponent = int(match["exponent"] or 0)
    value, divisor = (re.sub("[, ]", "", match[group] or "1") for group in ("value", "divisor"))
    if Fraction(divisor) == 0 or abs(exponent) > LARGEST_EXPONENT:
        return None
    number = Fraction(value) / Fraction(divisor) + int(match["mixed"] or 0)
    number *= Fraction(10) ** exponent
    return -number if match["sign"] == "-" else number


_INTEGER = re.compile(r"-?[0-9]{1,40}")
_LIST = r"(?:[,;]\s*)?(?:(?<![A-Za-z\\])(?:and|or)(?![a-z])|\\text\{\s*,?\s*(?:and|or)\s*\})|[,;]"
_EQUALS, _ORDER = r"=|\\(?:approx|in)(?![A-Za-z])", r"\\(?:le|ge|ne)(?![A-Za-z])|[<>]"
_TEXT = re.compile(r"\(?\\text\{[^{}]*\}\)?|(?=.*[A-Za-z]{3})[A-Za-z]{2,}(?:[ '-][A-Za-z]{2,})*")


@lru_cache(maxsize=8192)
def read_answer(text: str, reference: bool = False) -> Answer:
    r"""Parse the text of an answer, or of a reference answer, into a value.

    >>> read_answer(r"$(1, \frac12]$").kind, read_answer("x = 5").name
    ('interval', 'x')
    >>> read_answer("it is not 18").reason
    "it denies or hedges ('not')"
    """
    if _INTEGER.fullmatch(text):  # most references and answers
        return Answer("number", text, Fraction(int(text)))
    try:
        if len(text) > 4 * LONGEST:
            raise ValueError(f"longer than {4 * LONGEST} characters")
        return _parse(spelled(statement(text)), reference)
    except ValueError as error:
        return Answer("", text[:LONGEST], reason=str(error))


@lru_cache(maxsize=8192)
def read_reference(text: str) -> Answer:
    """Parse a reference answer like `read_answer`, except that `3m` is 3 times m, not a length."""
    if len(text) > 4 * READ:
        return Answer("", reason=f"longer than {4 * READ} characters")
    return read_answer(find_answer(text) or "", reference=True)


def bare(text: str) -> str:
    """Return the text without dollar signs, a final full stop, or spaces next to symbols."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[()\[\]]|[$*]", " ", text).strip().rstrip(" .")
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text)


def _parse(text: str, reference: bool) -> Answer:
    text = text.strip()
    if not text:
        raise ValueError("it is empty")
    if (number := _number(text, reference)) is not None:
        return Answer("number", text, number)
    opening, body, closing = _inside(text)
    items = _split(";", body if opening else text)
    items = items if len(items) > 1 else _split(_LIST, items[0])
    if opening in ("(", "[") and len(items) > 1:
        parts = tuple(_parse(item, reference) for item in items)
        kind = "interval" if opening + closing != "()" or r"\infty" in body else "tuple"
        return Answer(kind, text, None, parts, opening + closing)
    if builder := re.fullmatch(rf"\s*{NAME}\s*(?:\\mid|[|:])(.*)", body):  # {x | x > 2} is x > 2
        return _parse(builder[1], reference)
    if opening not in ("(", "["):
        items = [one for item in items for one in _both_signs(item)]
        if len(items) > 1 or opening == "⦃":  # an element of a set counts once
            parts = {bare(part.text): part for part in (_parse(one, reference) for one in items)}
            comma = _COMMA.fullmatch(text)
            number = comma and Fraction(f"{comma[1]}.{comma[2]}")
            return Answer("set", text, number, tuple(parts.values()), opening)
        if opening:
            return _parse(body, reference)
    if _TEXT.fullmatch(text):
        return Answer("text", text)
    return _relation(text, reference) or Answer("expression", text)


def _relation(text: str, reference: bool) -> Answer | None:
    r"""Parse an equation (`x = 5`, a chain, `x \in S`) or an inequality; else return None."""
    sides = [side.strip() for side in _split(_EQUALS, text)]
    name = sides[0] if re.fullmatch(NAME, sides[0]) else ""
    if name and len(sides) > 2 and r"\approx" in text:  # after x = 1/3, its approximate value
        sides = _split("=", _split(r"\\approx", text)[0])
    if len(sides) > 1:
        parts = tuple(_parse(side, reference) for side in sides[bool(name) :])
        return Answer("equation", text, None, parts, name=name)
    return Answer("inequality", text) if len(_split(_ORDER, text)) > 1 else None


def _inside(text: str) -> tuple[str, str, str]:
    """Return (opening bracket, content, closing bracket) if one pair encloses all of the text."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{⦃") - (letter in ")]}⦄")
        if not depth:
            whole = place == len(text) - 1 and place > 0
            return (text[0], text[1:-1], letter) if whole else ("", "", "")
    return "", "", ""


def _split(separator: str, text: str) -> list[str]:
    """Return the parts of the text between separators that are outside of all brackets."""
    parts, start, depth = [], 0, 0
    for token in re.finditer(rf"(?P<at>{separator})|[(\[{{⦃]|[)\]}}⦄]", text):
        if token["at"] is None:
            depth += 1 if token[0] in "([{⦃" else -1
        elif not depth:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _both_signs(text: str) -> list[str]:
    r"""Return `1 \pm 2` as `1 + 2` and `1 - 2`."""
    if text.count(r"\pm") != 1 or r"\mp" in text:
        return [text]
    return [re.sub(r"^\s*\+", "", text.replace(r"\pm", sign)) for sign in "+-"]
