"""Write attacks from the strings and regular expressions that stand in the rewards' own code.

A reward that counts "=", looks for a password, or matches `Step \\d+` is paid for such text
whatever the answer is. Each string is repeated, by itself and beside a wrong answer; of a regular
expression it is a short text that the expression matches.
"""

import re
import re._constants as sre
from collections.abc import Sequence
from re import _parser as parser
from typing import Any

from grpo_nb.reward_lab.mentions import strings_of
from grpo_nb.reward_lab.scoring import Scorer

LONGEST, MOST = 40, 12  # characters of a string, and how many strings are tried
TIMES = 4  # how often a string is repeated
FAMILY = "own words"
READ = {"role", "content", "assistant", "user", "system", "type", "text", "utf-8"}  # of chats
PATTERN = re.compile(r"[\\\[\](){}|*+^$]")
CATEGORIES = {sre.CATEGORY_DIGIT: "1", sre.CATEGORY_SPACE: " ", sre.CATEGORY_WORD: "a"}


def words_of(scorer: Scorer) -> list[str]:
    """Return the short texts that the rewards' code looks for, each once."""
    strings = dict.fromkeys(text for func in scorer.funcs for text in strings_of(func))
    names = {*scorer.columns, *scorer.names, *READ}
    texts = [_text_of(text) for text in strings if len(text) <= LONGEST and text not in names]
    return list(dict.fromkeys(text for text in texts if text.strip()))[:MOST]


def stuffed(words: Sequence[str], between: str = " ") -> dict[str, str]:
    """Return {name of an attack: text}: each string repeated, and all of them once and repeated."""
    whole = " ".join(words)
    texts = {f"{word!r} repeated": between.join([word] * TIMES) for word in words}
    return texts | {"all of its strings": whole, "all, repeated": between.join([whole] * TIMES)}


def _text_of(text: str) -> str:
    """Return a string, or a text that it matches if it is a regular expression; "" for neither."""
    if not PATTERN.search(text):
        return text
    try:
        example = _example(parser.parse(text))
        return example if re.search(text, example) else text
    except (re.error, RecursionError, OverflowError):
        return text


def _example(parts: Any) -> str:
    """Return a short text that a parsed regular expression matches."""
    return "".join(_of(kind, value) for kind, value in parts)


def _of(kind: Any, value: Any) -> str:
    """Return the text of one part of a regular expression; what is only looked at has none."""
    if kind is sre.LITERAL:
        return chr(value)
    if kind in (sre.ANY, sre.NOT_LITERAL):
        return "a"
    if kind is sre.CATEGORY:
        return CATEGORIES.get(value, "a")
    if kind is sre.RANGE:
        return chr(value[0])
    if kind is sre.IN:
        return "a" if value[0][0] is sre.NEGATE else _of(*value[0])
    if kind is sre.BRANCH:
        return _example(value[1][0])
    if kind is sre.SUBPATTERN:
        return _example(value[3])
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
        least, most, repeated = value
        return _example(repeated) * min(max(least, 1), most, LONGEST)
    return ""
