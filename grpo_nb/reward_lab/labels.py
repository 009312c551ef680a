"""Find the words by which rewards know a column's numbers and truth values.

A row may say 2 where the completion has to say "C" or "positive", and True where it has to say
"safe". The words stand in the rewards' code, or are letters or yes and no.
"""

from collections.abc import Iterator, Sequence
from string import ascii_uppercase
from typing import Any

from grpo_nb.reward_lab.scoring import Scorer

MOST_VALUES, MOST_WORDS, FORMS = 10, 60, 12
WIDTH = 24  # characters of the longest word
TIE = 1e-6
USUAL = ("yes", "no", "Yes", "No", "true", "false", "True", "False")


def named(
    scorer: Scorer, columns: Sequence[str], strings: Sequence[str], forms: Sequence[str]
) -> dict[str, dict[int, str]]:
    """Return {description: {number of a row: the word for its value}}, for columns with few values.

    Args:
        scorer: The rewards with rows and weights.
        columns: The columns that the rewards read.
        strings: The strings of the rewards' code.
        forms: Forms in which a word may be written.
    """
    words = [text for text in strings if len(text) <= WIDTH and text.replace(" ", "").isalpha()]
    words = list(dict.fromkeys([*words, *ascii_uppercase[:MOST_VALUES], *USUAL]))[:MOST_WORDS]
    short = [form for form in forms if "{reasoning}" not in form][:FORMS]
    ways = {}
    for column in columns:
        values = [row.get(column) for row in scorer.rows]
        if all(isinstance(value, int) for value in values) and len(set(values)) <= MOST_VALUES:
            for choice in _chosen(scorer, values, words, short):
                answers = {number: choice[value] for number, value in enumerate(values)}
                ways.setdefault(f"{column}, as a word", answers)
    return ways


def _chosen(
    scorer: Scorer, values: Sequence[Any], words: Sequence[str], forms: Sequence[str]
) -> Iterator[dict[Any, str]]:
    """Yield {value: the one word that earns most} for each form in which every value has a word."""
    first = {value: number for number, value in reversed(list(enumerate(values)))}
    for form in forms:
        pairs = [(row, form.replace("{answer}", word)) for row in first.values() for word in words]
        totals = scorer.totals(pairs).reshape(len(first), len(words))
        best = totals.argmax(axis=1)
        is_clear = (totals.max(axis=1) > totals.mean(axis=1) + TIE).all()
        if is_clear and len(first) > 1 and len(set(best)) == len(first):
            yield {value: words[place] for value, place in zip(first, best, strict=True)}
