r"""What counts as an answer: where a completion says it, what it says, and what equals it.

    find   "… so the answer is $x = \frac12$."   $x = \frac12$     by tag, box or marker
    read   $x = \frac12$                         an equation of x, whose value is the number 1/2
    same   and the reference 0.5                 equal, as numbers

All rewards of numbers and mathematics go through here, and so do the reference answers of a data
set. Precision comes first: what names two candidates, denies, hedges, or cannot be read whole is
refused with a reason, and earns nothing. Numbers are compared as rationals; sets, tuples and
intervals part by part; what is left by math-verify, in a process that can be killed.
"""

import re
import unicodedata
from collections.abc import Iterable
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from grpo_nb.answers.math_worker import equal_latex

READ, LONGEST, DEEPEST = 20_000, 500, 20  # last characters of a completion; of an answer; brackets
LARGEST_EXPONENT, LEAST_DECIMALS = 300, 4


class Answer(NamedTuple):
    """What a text says as an answer; `kind` is "" where it is refused, and `reason` says why."""

    kind: str  # number, expression, set, tuple, interval, equation, inequality, text
    text: str = ""  # in one spelling
    number: Fraction | None = None
    parts: tuple["Answer", ...] = ()  # of a set or pair; the sides of an equation but for its name
    shape: str = ""  # the brackets around the parts
    name: str = ""  # x, of x = 5
    reason: str = ""


# -- where a completion says it


def extract_tag(text: str, tag: str) -> str | None:
    """What stands in the last complete `<tag>…</tag>`, stripped; None where there is none.

    The last one counts, so listing candidates ("<answer>1</answer><answer>2</answer>…")
    gains nothing; rewards of format refuse a repeated tag.

    >>> extract_tag("<answer>84</answer> no: <answer> 85 </answer>", "answer")
    '85'
    >>> extract_tag("<answer>85", "answer") is None
    True
    """
    last = text.rfind(f"</{tag}>")
    opening = text.rfind(f"<{tag}>", 0, max(last, 0))
    if opening < 0:
        return None
    return text[opening + len(tag) + 2 :].partition(f"</{tag}>")[0].strip()


def boxes_of(text: str) -> list[tuple[int, int]]:
    r"""(start, end) of what stands in each closed `\boxed{…}` that is in no other, in one pass."""
    found, open_braces = [], []
    if (first := text.find(r"\boxed")) < 0:
        return []
    for brace in re.compile(r"\\boxed\s*\{|\\[{}]|[{}]").finditer(text, first):
        if brace[0].endswith("{"):
            open_braces.append((brace[0].startswith(r"\boxed"), brace.end()))
        elif open_braces:
            boxed, start = open_braces.pop()
            while boxed and found and found[-1][0] > start:
                found.pop()
            found += [(start, brace.start())] if boxed else []
    return found


def extract_boxed(text: str) -> str | None:
    r"""What stands in the last closed `\boxed{…}`, braces balanced; None where there is none.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}.")
    '\\frac{1}{2}'
    """
    boxes = boxes_of(text)
    return text[slice(*boxes[-1])].strip() if boxes else None


def extract_hash_answer(text: str) -> str | None:
    """What follows the last `####`, as GSM8K marks its answers.

    >>> extract_hash_answer("She earned 0.2 x 50 = $10.\\n#### 10")
    '10'
    """
    _, marker, answer = text.rpartition("####")
    return answer.strip() or None if marker else None


_HEADING = re.compile(r"(?i)(?:\*\*|^|(?<=[.\n]))[#* ]{0,9}\bfinal answer\b[*: ]{0,9}(?!\s*is\b)")
_MARKER = re.compile(r"(?i)####|\banswer\*{0,2}\s*(?:is\b\s*:?|:)\*{0,2}")
_CONCLUSION = re.compile(r"(?<!\S)(?:Therefore|Thus|Hence|So)\b,?")
_NAME = (
    r"(?:(?:\\[A-Za-z]+|[A-Za-z]{1,20}|\\text\{[^{}]*\})(?:_(?:\{[^{}]*\}|\w))?'*(?:\^\{-1\})?"
    r"(?:\s?\(\s?[A-Za-z](?:\s?,\s?[A-Za-z])*\s?\))?|\(\s?[A-Za-z](?:\s?,\s?[A-Za-z])*\s?\))"
)
_SAID = (
    r"(?:(?!(?:pi|sin|cos|tan|log|exp|mod)\b)[A-Za-z]{2}[A-Za-z'’-]*|[aAI])(?![A-Za-z])"  # a word
)
_LONE_NUMBER = re.compile(
    rf"\s*(?:{_SAID}[,:;]?\s+)*(-?\d(?:[\d,./]*\d)?%?)(?:\s+{_SAID}[,:;]?)*[\s.]*"
)
_SENTENCE_END = re.compile(r"[.!?]\s")
_GOES_ON = re.compile(r"(?i)[\s.!?]*(?:or|wait|no|not|but|actually|maybe|perhaps|however|unless)\b")


def find_answer(text: str) -> str | None:
    r"""The words of a completion that are its answer; None where there are none.

    Those of the last answer tag; else of the text behind `</think>` and behind "**Final answer**"
    all its boxes, or what the last "the answer is", "Answer:" or `####` after them says; else the
    last sentence that begins with "Therefore", "Thus", "Hence" or "So"; else the whole text.

    >>> texts = "<answer>18</answer>", r"so \boxed{18}.", "The answer is 18. I hope so"
    >>> [find_answer(text) for text in texts]
    ['18', '18', '18']
    """
    if (tagged := extract_tag(text, "answer")) is not None:
        return tagged
    if "<answer>" in text:
        return None
    text, heading = text.rpartition("</think>")[2][-READ:], None
    said = "nswer" in text or "NSWER" in text or "####" in text  # quicker than to look for each
    for heading in list(_HEADING.finditer(text))[-1:] if said else []:
        text = text[heading.end() :]
    for marker in list(_MARKER.finditer(text))[-1:] if said else []:
        text = text[marker.end() :]
        if marker[0] == "####":
            return text.strip() or None
        said = _sentence(text)
        if r"\boxed" in said or r"\boxed" not in text:
            return said.strip() or None
    if boxes := boxes_of(text):
        said = list(dict.fromkeys(text[start:end] for start, end in boxes))
        if len(said) == 1:
            return said[0].strip()
        taken_back = _HEDGE.search(text[boxes[0][1] : boxes[-1][0]])  # all will be refused
        return text if taken_back else ", ".join(rf"\boxed{{{box}}}" for box in said)
    for conclusion in list(_CONCLUSION.finditer(text))[-1:] if heading is None else []:
        return _sentence(text[conclusion.end() :]).strip()
    return (_sentence(text) if heading else text).strip() or None


def _sentence(text: str) -> str:
    """The first sentence, or the one number in it; all, to be refused, where it is taken back."""
    end = _SENTENCE_END.search(text)
    if end and _GOES_ON.match(text, end.end()):
        return text
    text = text[: end.start()] if end else text
    words = re.sub(rf"\$\s*(?:{_NAME}|(-?\d[\d.,/]*%?))\s*\$|[$€£](?=\d)", r" \1", text)
    lone = _LONE_NUMBER.fullmatch(words)
    return lone[1] if lone and not _HEDGE.search(words) else text


# -- what it says

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
_HEDGE = re.compile(
    r"(?i)(?<![\\\w])(?:not?|nor|never|neither|either|isn|aren|wasn|don|doesn|cannot|can't|if"
    r"|unless|maybe|perhaps|possibly|probably|might|wrong|incorrect|false|instead|except|but|wait"
    r"|guess|unknown"
    r"|(?:at|the) (?:least|most)\b(?! \w+ \w)|(?:more|less|fewer|greater|smaller|other) than"
    r"|between|twice|double|half|minus|plus|times|over|squared|cubed|hundred|thousand|[mb]illion"
    r"|dozen|factorial|choose)\b"
)


def spelled(text: str) -> str:
    """The text in one spelling of LaTeX, Unicode and white space, without a full stop.

    Raises:
        ValueError: It is too long, its brackets do not match, or it would only burn time.
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
    bare = text = " ".join(text.split()).strip("*_ ").rstrip(". ")
    for _ in range(DEEPEST):
        bare = _INNERMOST.sub("", bare)
    # An interval's brackets need not be of one kind, so only their number is held.
    if re.search(r"[()\[\]{}⦃⦄]", bare):
        raise ValueError("its brackets do not match, or go too deep")
    if _HEAVY.search(text):
        raise ValueError("it is too large to compute")
    return text


_SET_EQUAL = re.compile(rf"{_NAME}\s*(?:=|\\in|\\approx)\s*(?=□)")
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
_AFTER = re.compile(rf"\s*(?:%|pct)?(?:[\s().,;:\"*$]|(?<![A-Za-z'’-]){_SAID})*")


def statement(text: str) -> str:
    r"""The mathematics that a statement makes, without boxes, dollars and words around it.

    >>> statement(r"so it follows that $k = \frac13$."), statement("the answer is 18")
    ('k = \\frac13', '18')

    Raises:
        ValueError: It names several candidates, or denies, or hedges.
    """
    text = text.replace(r"\"", "").strip(" \t\n*")
    if boxes := boxes_of(text):
        said = [text[start:end] for start, end in boxes]
        for start, end in reversed(boxes):
            text = f"{text[: text.rindex(chr(92), 0, start - 5)]}□{text[end + 1 :]}"
        outside = re.sub(r"\\[()\[\]]|\$", "", text)
    elif spans := [next(filter(None, span.groups())).strip() for span in _MATH.finditer(text)]:
        said = [span for span in spans if not re.fullmatch(_NAME, span)] or spans[-1:]
        marks = iter("□" if span in said else "" for span in spans)
        outside = _MATH.sub(lambda _: next(marks), text)
        if re.search(r"\d", outside) and all(re.fullmatch(_NAME, span) for span in spans):
            return _without_words(_MATH.sub("it", text))
    else:
        return _without_words(text)
    outside = _SET_EQUAL.sub("", outside)
    before, *between, after = outside.split("□")
    joined = all(_AND.fullmatch(words) for words in between) and _AFTER.fullmatch(after)
    if _BESIDE.search(outside) or not joined:
        raise ValueError("it says more than one thing")
    return _not_hedged(", ".join(said), before + after) + ("%" if _PERCENT.match(after) else "")


_PERCENT = re.compile(r"\s*(?:%|percent|pct)")
_AND = re.compile(r"[\s,;.]*(?:\b(?:and|or)\b)?[\s,;.]*")


def _without_words(text: str) -> str:
    """The mathematics of a text that marks none of it: what follows the last "is" or colon."""
    said, words = text, ""
    while copula := _COPULA.fullmatch(said):
        said, words = copula[2], words + copula[1]
    if tail := _TAIL.fullmatch(said):
        said, words = tail[1], words + text[-len(said) + tail.end(1) :]
    return _not_hedged(said, text if re.search(r"\d", said) else words)


def _not_hedged(said: str, words: str) -> str:
    if hedge := _HEDGE.search(words):
        raise ValueError(f"it says {hedge[0]!r}")
    return said


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
    r"""The one number that a whole reference answer says, exactly; None if it says anything else.

    One sign, currency mark, thousands, decimals, a division, a mixed number, a power of ten, a
    percent sign or a unit are understood. A unit is one of a list, `\text{…}`, or up to two words
    of three letters; `2n`, `3m`, `5!` are no numbers. A percentage is its number: 50 % is 50.

    >>> parse_number("$1,875.00"), parse_number("**18**"), parse_number("36/2 apples")
    (Fraction(1875, 1), Fraction(18, 1), Fraction(18, 1))
    >>> parse_number("1 1/2"), parse_number("1.5e3"), parse_number("2n"), parse_number("17 or 18")
    (Fraction(3, 2), Fraction(1500, 1), None, None)
    """
    answer = read_reference(text)
    return answer.number if answer.kind == "number" else None


def _number(text: str, reference: bool) -> Fraction | None:
    match = _NUMBER.fullmatch(_FRACTION.sub(r" \1/\2", text).strip())
    if match is None or (reference and match["short"]) or _HEDGE.search(match["unit"]):
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
    r"""What the words of an answer, or a reference answer, say.

    >>> read_answer(r"$(1, \frac12]$").kind, read_answer("x = 5").name
    ('interval', 'x')
    >>> read_answer("it is not 18").reason
    "it says 'not'"
    """
    if _INTEGER.fullmatch(text):  # most references and answers
        return Answer("number", text, Fraction(int(text)))
    try:
        if len(text) > 4 * LONGEST:
            raise ValueError(f"longer than {4 * LONGEST} characters")
        return _parse(spelled(statement(text)), reference)
    except ValueError as error:
        return Answer("", text[:LONGEST], reason=str(error))


def _parse(text: str, reference: bool) -> Answer:
    text = text.strip()
    if not text:
        raise ValueError("it says nothing")
    if (number := _number(text, reference)) is not None:
        return Answer("number", text, number)
    opening, body, closing = _inside(text)
    items = _split(";", body if opening else text)
    items = items if len(items) > 1 else _split(_LIST, items[0])
    if opening in ("(", "[") and len(items) > 1:
        parts = tuple(_parse(item, reference) for item in items)
        kind = "interval" if opening + closing != "()" or r"\infty" in body else "tuple"
        return Answer(kind, text, None, parts, opening + closing)
    if builder := re.fullmatch(rf"\s*{_NAME}\s*(?:\\mid|[|:])(.*)", body):  # {x | x > 2} is x > 2
        return _parse(builder[1], reference)
    if opening not in ("(", "["):
        items = [one for item in items for one in _both_signs(item)]
        if len(items) > 1 or opening == "⦃":  # what a set has twice it has once
            parts = {_bare(part.text): part for part in (_parse(one, reference) for one in items)}
            comma = _COMMA.fullmatch(text)
            number = comma and Fraction(f"{comma[1]}.{comma[2]}")
            return Answer("set", text, number, tuple(parts.values()), opening)
        if opening:
            return _parse(body, reference)
    if _TEXT.fullmatch(text):
        return Answer("text", text)
    return _relation(text, reference) or Answer("expression", text)


def _relation(text: str, reference: bool) -> Answer | None:
    r"""An equation (`x = 5`, a chain, `x \in S`) or an inequality."""
    sides = [side.strip() for side in _split(_EQUALS, text)]
    name = sides[0] if re.fullmatch(_NAME, sides[0]) else ""
    if name and len(sides) > 2 and r"\approx" in text:  # after x = 1/3, what it is about
        sides = _split("=", _split(r"\\approx", text)[0])
    if len(sides) > 1:
        parts = tuple(_parse(side, reference) for side in sides[bool(name) :])
        return Answer("equation", text, None, parts, name=name)
    return Answer("inequality", text) if len(_split(_ORDER, text)) > 1 else None


def _inside(text: str) -> tuple[str, str, str]:
    """(opening bracket, what it holds, closing one), where one pair holds all of the text."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "([{⦃") - (letter in ")]}⦄")
        if not depth:
            whole = place == len(text) - 1 and place > 0
            return (text[0], text[1:-1], letter) if whole else ("", "", "")
    return "", "", ""


def _split(separator: str, text: str) -> list[str]:
    """The text between separators that stand in no bracket."""
    parts, start, depth = [], 0, 0
    for token in re.finditer(rf"(?P<at>{separator})|[(\[{{⦃]|[)\]}}⦄]", text):
        if token["at"] is None:
            depth += 1 if token[0] in "([{⦃" else -1
        elif not depth:
            parts.append(text[start : token.start()])
            start = token.end()
    return [*parts, text[start:]]


def _both_signs(text: str) -> list[str]:
    r"""`1 \pm 2` as `1 + 2` and `1 - 2`."""
    if text.count(r"\pm") != 1 or r"\mp" in text:
        return [text]
    return [re.sub(r"^\s*\+", "", text.replace(r"\pm", sign)) for sign in "+-"]


# -- what equals it

_JUXTAPOSED = re.compile(  # math-verify adds "17 1"
    r"\d(?:\s|\{\}|\^\{?\\circ\}?|\\(?:[lc]?dots|\w*style|\w+\{\s*\}))+\d"
)
_AS_OFTEN_AS_IN_REFERENCE = [
    r"[=:;]",
    r"\\(?:sum|prod|int|lim|binom|[lc]?dots)(?![A-Za-z])",
    r"['\"$]|boxed|\.\.",
]
_COMMAND = re.compile(r"\\text\s*\{[^{}]*\}|\\(?:begin|end)\{\w+\*?\}|\\[A-Za-z]+")
HOW = {"number": "as numbers", "set": "as sets", "tuple": "as tuples", "interval": "as intervals"}
HOW |= {"text": "as words", "equation": "as equations"}
HOW |= dict.fromkeys(("expression", "inequality"), "symbolically")


def compare_answers(
    reference: str, said: str | None, seconds: float = 0.5
) -> tuple[bool | None, str]:
    r"""Whether the words of an answer say what the reference says; with the reason.

    Args:
        reference: The right answer, in words and LaTeX as `find_answer` gives them.
        said: The answer in the same form; None where a completion has none.
        seconds: Processor time for one symbolic comparison.

    Returns:
        None for a reference that cannot be used; False also for an answer that is refused.

    >>> compare_answers(r"\frac{1}{2}", "the answer is $x = 0.5$")
    (True, 'read as equation x = 0.5, compared as numbers')
    >>> compare_answers("18", "17 or 18")
    (False, 'read as set 17 or 18, compared as numbers')
    """
    expected, found = read_reference(reference), read_answer(said or "")
    if found.kind == expected.kind == "number":
        return same_number(expected, found), f"read as number {found.text}, compared as numbers"
    if said and len(said) < 4 * LONGEST and _bare(reference) == _bare(said) != "":
        return True, "written as the reference is"
    if fault := unusable(expected, seconds):
        return None, f"the reference answer {reference!r} cannot be used: {fault}"
    if not found.kind:
        return False, f"refused: {found.reason}"
    verdict = _same(expected, found, seconds)
    core = expected.parts[-1] if expected.kind == "equation" and expected.name else expected
    return verdict, f"read as {found.kind} {_latex(found.text)}, compared {HOW[core.kind]}"


@lru_cache(maxsize=8192)
def read_reference(text: str) -> Answer:
    """Read a reference answer: as `read_answer`, but `3m` is three times m, and not a length."""
    if len(text) > 4 * READ:
        return Answer("", reason=f"longer than {4 * READ} characters")
    return read_answer(find_answer(text) or "", reference=True)


def _bare(text: str) -> str:
    """The text without dollars, full stop, and spaces that part no two words or numbers."""
    text = re.sub(r"\\(?:left|right)(?![A-Za-z])|\\[()\[\]]|[$*]", " ", text).strip().rstrip(" .")
    return re.sub(r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", "", text)


def unusable(expected: Answer, seconds: float = 0.5) -> str:
    """Why no answer can match a reference answer, unless it is written alike; or ""."""
    whole = expected.kind == "equation" and not expected.name
    if whole or expected.kind in ("expression", "inequality"):
        parsed = equal_latex(_latex(expected.text), "", seconds) is not None
        return "" if parsed else "math-verify cannot parse it"
    return expected.reason or next(
        filter(None, (unusable(part, seconds) for part in expected.parts)), ""
    )


def _same(expected: Answer, found: Answer, seconds: float) -> bool | None:
    if _bare(expected.text) == _bare(found.text):
        return True
    kinds = {expected.kind, found.kind}
    lists = expected.parts and found.parts
    if expected.number is not None and found.number is not None and not lists:
        return same_number(expected, found)
    if kinds == {"set", "inequality"}:
        return False  # math-verify would let {0, 1} pass for (0, 1)
    if "inequality" in kinds:  # or the interval that it says
        return _symbolic(expected.text, found.text, seconds)
    if "equation" in kinds:
        return _same_equation(expected, found, seconds)
    if lists:
        return _same_parts(expected, found, seconds)
    if "text" in kinds:
        return _letters(expected.text) == _letters(found.text) != ""
    if found.parts:
        return False
    return _symbolic(expected.text, found.text, seconds)


def same_number(expected: Answer, found: Answer) -> bool:
    """Whether two numbers are equal, or one is a percentage and the other its hundredth.

    A decimal of LEAST_DECIMALS places or more has to be right only as far as it goes, where the
    reference, as 1/3, has no end.
    """
    left, right = expected.number, found.number
    if left == right:
        return True
    percent = expected.text.endswith("%") - found.text.endswith("%")
    if percent and left * 10**-percent * 10**-percent == right:
        return True
    places = len(match[1]) if (match := re.search(r"\.(\d+)$", found.text)) else 0
    endless = 10**40 % left.denominator
    return bool(endless and places >= LEAST_DECIMALS and abs(left - right) * 10**places <= 0.5)


def _same_equation(expected: Answer, found: Answer, seconds: float) -> bool | None:
    """Values of one name, or of a chain of which each part is the reference, or two relations."""
    if found.kind != "equation" and not (expected.name or len(expected.parts) > 2):
        return _symbolic(expected.text, found.text, seconds)  # 1 for |AB| = 1, no 0 for x + y = 0
    target = expected.parts[-1] if expected.kind == "equation" else expected
    one_name = _bare(expected.name) == _bare(found.name) != ""
    if expected.kind != found.kind or one_name:
        values = found.parts if found.kind == "equation" else [found]
        return _all(_same(target, value, seconds) for value in values)
    return _symbolic(expected.text, found.text, seconds)


def _same_parts(expected: Answer, found: Answer, seconds: float) -> bool | None:
    """Sets in any order; pairs, and values of different names, in theirs."""
    left, right = expected.parts, list(found.parts)
    several = len({part.name for part in left if part.name}) > 1  # k = 45, n = 2
    alike = [one.kind == "set" or one.shape for one in (expected, found)]
    loose = several and found.shape == "()"  # the values alone, in order
    if len(left) != len(right) or (alike[0] != alike[1] and not loose):
        return False
    if alike != [True, True] or (several and not any(part.name for part in right)):
        return _all(_same(one, other, seconds) for one, other in zip(left, right, strict=True))
    for one in left:
        match = next((other for other in right if _same(one, other, seconds)), None)
        if match is None:
            return False
        right.remove(match)
    return True


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    return next((verdict for verdict in verdicts if not verdict), True)


def _letters(text: str) -> str:
    return re.sub(r"\\text|[\W_]", "", text).casefold()


def _symbolic(reference: str, answer: str, seconds: float) -> bool | None:
    """What math-verify says, if the answer says one thing in a form the reference has as well."""
    expected, text = _latex(reference), _latex(answer)
    based = [len(re.findall(r"\d\s*_", one)) for one in (expected, text)]  # 204 to the base 5
    if _JUXTAPOSED.search(text) or based[0] != based[1]:
        return False
    marks = _AS_OFTEN_AS_IN_REFERENCE
    if any(len(re.findall(mark, text)) > len(re.findall(mark, expected)) for mark in marks):
        return False
    bare, known = (_COMMAND.sub(" ", one) for one in (text, expected))
    words = re.findall(r"[^\W\d_]{2,}", bare)  # "xy" is a product if the reference knows x and y
    return all(set(word) <= set(known) for word in words) and equal_latex(expected, text, seconds)


def _latex(text: str) -> str:
    r"""As math-verify reads it: braces of LaTeX, and 1e-5 as a power of ten."""
    text = text.replace("⦃", r"\{").replace("⦄", r"\}")
    return re.sub(r"(?<=\d)[eE]([-+]?\d+)", r"\\cdot 10^{\1}", text)
