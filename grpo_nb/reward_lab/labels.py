"""Find the words by which rewards know a column's numbers and truth values.

A row may say 2 where the completion has to say "C" or "positive", and True where it has to say
"safe". The words stand in the rewards' code, or are letters or yes and no.
"""

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any

from grpo_nb.reward_lab.scoring import TIE, Scorer

VALUES, MOST_WORDS, FORMS = 8, 120, 12  # values whose words are looked for; what is tried
WIDTH = 24  # characters of the longest word
SECONDS = 0.5  # for the words in one form; slower rewards are not asked
USUAL = ("yes", "no", "Yes", "No", "true", "false", "True", "False")


def named(
    scorer: Scorer, columns: Sequence[str], strings: Sequence[str], forms: Sequence[str]
) -> dict[str, dict[int, str]]:
    """Return {description: {number of a row: the word for its value}}, for columns of numbers.

    Args:
        scorer: The rewards with rows and weights.
        columns: The columns that the rewards read.
        strings: The strings of the rewards' code.
        forms: Forms in which a word may be written.
    """
    words = [text for text in strings if re.fullmatch(rf"\w[\w /&-]{{0,{WIDTH}}}", text)]
    words = list(dict.fromkeys([*words[:MOST_WORDS], *ascii_uppercase[:10], *USUAL]))
    short = [form for form in forms if "{reasoning}" not in form][:FORMS]
    ways = {}
    for column in columns:
        values = [row.get(column) for row in scorer.rows]
        if all(isinstance(value, int) for value in values):
            choice = _chosen(scorer, values, words, short)
            if answers := {n: choice[v] for n, v in enumerate(values) if v in choice}:
                ways[f"{column}, as a word"] = answers
    return ways


def _chosen(
    scorer: Scorer, values: Sequence[Any], words: Sequence[str], forms: Sequence[str]
) -> dict[Any, str]:
    """Return {value: the one word that earns most} in the first form in which each has a word."""
    first: dict[Any, int] = {}
    for number, value in enumerate(values):
        first.setdefault(value, number)
    first = dict(list(first.items())[:VALUES])
    for form in forms:
        pairs = [(row, form.replace("{answer}", word)) for row in first.values() for word in words]
        if scorer.each.sum() * len(pairs) > SECONDS:
            break
        totals = scorer.totals(pairs).reshape(len(first), len(words))
        best = totals.argmax(axis=1)
        is_clear = (totals.max(axis=1) > totals.mean(axis=1) + TIE).all()
        if is_clear and len(first) > 1 and len(set(best)) == len(first):
            return {value: words[place] for value, place in zip(first, best, strict=True)}
    return {}
