"""Write attacks from the strings and regular expressions that stand in the rewards' own code.

A reward that counts "=", looks for a password, or matches `Step \\d+` is paid for such text
whatever the answer is. Each string is repeated, by itself and beside a wrong answer; of a regular
expression it is a short text that the expression matches.
"""

import re
from collections.abc import Sequence

from grpo_nb.reward_lab.mentions import strings_of
from grpo_nb.reward_lab.patterns import sample_of
from grpo_nb.reward_lab.scoring import Scorer

LONGEST, MOST = 40, 12  # characters of a string, and how many strings are tried
TIMES = 4  # how often a string is repeated
FAMILY = "own words"
READ = {"role", "content", "assistant", "user", "system", "type", "text", "utf-8"}  # of chats
PATTERN = re.compile(r"[\\\[\](){}|*+^$]")


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
    """Return a string, or a text that it matches if it is a regular expression."""
    sample = sample_of(text, "a") if PATTERN.search(text) else ""
    return sample if sample and re.search(text, sample) else text
