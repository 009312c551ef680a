"""Read from a regular expression how a completion is written that it matches.

A reward's pattern says what its author wants, tags and words in any language. Each part that may be
any text is a place for the reasoning or for the answer.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

WILD, SPACE = "\0", "\1"  # stand for a part that may be any text, and for space that may be there
LEAST = 3  # characters, besides white space, that a pattern spells out; `\d+` tells nothing
MARKS = re.compile(r"[<>\[\]{}#`\\\n:]")  # of what stands around an answer
UNIT = re.compile(r"[$€£¥%°]")  # tells something by itself
EXAMPLES = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " "}
LONGEST = 40  # repeats of a part in a sample
MANY = 12  # forms that are read from the patterns of a set of rewards
PATTERN = re.compile(r"\\[sdwSDW]|\.[*+]|\[\^|\(\?")  # no sentence holds one of these
_parser = sys.modules["re._parser"]  # the module that `re.compile` itself parses with


def forms_in(strings: Iterable[str]) -> list[str]:
    """Return the forms of the strings that are patterns, those with most parts first.

    Args:
        strings: The strings of the rewards' code.

    >>> forms_in([r"^<t>.+?</t>\\s*Cevap\\s*:\\s*([^\\n]+)$", r"-?\\d+", "no pattern"])[:1]
    ['<t>{reasoning}</t>Cevap: {answer}']
    """
    samples = [text for text in map(sample_of, filter(PATTERN.search, strings)) if WILD in text]
    samples = [t for t in samples if len(re.sub(rf"[\s{WILD}]", "", t)) >= LEAST or UNIT.search(t)]
    forms = [
        form
        for text in sorted(samples, key=lambda text: -text.count(WILD))
        for form in _filled(text)
    ]
    return list(dict.fromkeys(forms))[:MANY]


def _filled(text: str) -> Iterator[str]:
    """Yield the text with its last part as the answer; if nothing follows that, the one before."""
    parts = text.split(WILD)
    for place in (len(parts) - 1, len(parts) - 2)[: 1 if parts[-1].strip() else 2]:
        if place > 0:
            before, after = "{reasoning}".join(parts[:place]), "".join(parts[place:])
            yield f"{before}{{answer}}{after}"


def sample_of(pattern: str, text: str = WILD) -> str:
    r"""Return a short text that a pattern matches; "" if it is none.

    Args:
        pattern: The regular expression.
        text: What stands for any text. With WILD, what is optional is left out, and so are words
            that are as good as any text.

    >>> sample_of(r"(?i)Answer[:=]\s*(yes|no)\b")
    'Answer: \x00'
    >>> sample_of(r"<a>\s*([\s\S]*?)</a>"), sample_of(r"Step \d+(, \w)?", "a")
    ('<a>\x00</a>', 'Step 1, a')
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            sample = _sample(_parser.parse(pattern), text)
    except (re.error, RecursionError, OverflowError):
        return ""
    sample = re.sub(rf"(?<=[\w:=]){SPACE}+(?={WILD})", " ", sample).replace(SPACE, "")
    return re.sub(rf"{WILD}+(\.{WILD}+)*", WILD, sample)  # a number with decimals is one answer


def _sample(parts: Iterable[tuple[Any, Any]], text: str) -> str:
    return "".join(_of_one(str(kind), value, text) for kind, value in parts)


def _of_one(kind: str, value: Any, text: str) -> str:
    """Return the text of one part of a regular expression; what is only looked at has none."""
    is_form = text == WILD
    if kind == "LITERAL":
        return chr(value)
    if kind == "SUBPATTERN":
        return _sample(value[-1], text)
    if kind == "BRANCH":  # one of several words is as good as any text
        texts = [_sample(each, text) for each in value[1]]
        is_any = is_form and all(texts) and not any(map(MARKS.search, texts))
        return WILD if is_any else texts[0]
    if kind.endswith("_REPEAT"):
        least, most, part = value
        one = _sample(part, text)
        if not is_form:
            return one * min(max(least, 1), most, LONGEST)
        if one == "\n" and not least:
            return SPACE
        return WILD if WILD in one and most > 1 else one * min(least, LEAST)
    if kind == "RANGE":
        return chr(value[0])
    if kind == "CATEGORY" and not is_form:
        return EXAMPLES.get(str(value), text)
    if kind == "IN" and not is_form:
        return _sample(value[:1], text)
    if kind == "IN":
        if {str(one) for one, _ in value} == {"LITERAL"}:
            return chr(value[0][1])
        members = " ".join(str(each) for _, each in value)
        return {"CATEGORY_SPACE": "\n", "CATEGORY_NOT_WORD": ": "}.get(members, text)
    return text if kind in ("ANY", "NOT_LITERAL", "CATEGORY", "NEGATE") else ""
