"""Find questions that occur twice: exactly, nearly, or with different answers.

Words are compared in lower case and without punctuation or thousands separators. In scripts without
spaces each character counts as a word. Near-duplicates have the same numbers and operators, and
share most sequences of three words. "What is 47 + 38?" and "What is 47 + 39?" are therefore two
different questions.
"""

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_nb.data.validate import ValidRow
from grpo_nb.rewards.prompts import Message, digest, message_text

NOT_COMPARED = ("prompt", "question", "prompt_tokens", "images")
ALIKE = 0.7  # rows that share at least this part of their sequences of words are near-duplicates
# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"\d+(?:\.\d+)*|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|[^\w\s]")
OPERATORS = "-*/%"  # Unicode calls them punctuation
ONE_FORM = {0xFF01 + place: 0x21 + place for place in range(94)}  # full-width letters and digits
ONE_FORM |= str.maketrans("−–×⁄÷’", "--*//'")
_COUNTS = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
hundred thousand million billion half third quarter twice double triple dozen"""
COUNTS = frozenset(_COUNTS.split())


def fingerprints(rows: Sequence[ValidRow], columns: bool = False) -> pd.DataFrame:
    """Return the fingerprints of rows: hashes that are equal if the rows are.

    Args:
        rows: The rows.
        columns: Whether extra columns count as part of the question, as with an environment.

    Returns:
        A table with the fingerprints of each row: row (its number in the source); hashes of
        question (with its images) and answer; sequences (hashes of its sequences of three words,
        each with all numbers of the row); and images (a tuple of hashes).
    """
    lines = []
    for one in rows:
        key = _key(one.row["prompt"])
        if columns:
            others = {k: v for k, v in one.row.items() if k not in NOT_COMPARED}
            key += f" {json.dumps(others, default=str)}"
        images = tuple(hash(digest(each)) for each in one.row.get("images", ()))
        words = _words(key)
        numbers = tuple(filter(_counts, words))
        threes = [*zip(words, words[1:], words[2:], strict=False)] or [tuple(words)]
        sequences = np.fromiter({hash((numbers, three)) for three in threes}, np.int64)
        # hash(-1) equals hash(-2), so answers are hashed as texts
        plain = hash(repr(one.plain))
        lines.append((one.number, hash((key, images)), plain, sequences, images))
    names = ["row", "question", "answer", "sequences", "images"]
    return pd.DataFrame(lines, columns=names)


def _counts(word: str) -> bool:
    """Return whether a word is a number or operator: changing it changes the problem."""
    return not word.isalpha() or word in COUNTS or word[0].isnumeric()


def _key(prompt: Sequence[Message]) -> str:
    """Return the text of all turns except the system's, in normalized case and spacing."""
    texts = [message_text(turn) for turn in prompt if turn["role"] != "system"]
    text = unicodedata.normalize("NFC", " ".join(texts)).translate(ONE_FORM)
    return " ".join(text.casefold().split())


def _words(key: str) -> list[str]:
    """Return the words, numbers, operators and signs of a text, or the text if it has none."""
    words = WORD.findall(re.sub(r"(?<=\d)[,' ](?=\d{3}(?!\d))", "", key))
    kinds = ((word, unicodedata.category(word[0])[0]) for word in words)
    return [word for word, kind in kinds if kind not in "PM" or word in OPERATORS] or [key]


def near(prints: pd.DataFrame, held_out: np.ndarray) -> np.ndarray:
    """Return which rows share an image with a held-out row, or are near-duplicates of one.

    If held-out rows have images, only images are compared, as rows often ask the same question.

    Args:
        prints: Fingerprints of the rows.
        held_out: Positions of the held-out rows.

    Returns:
        True or False for each row; False for the held-out rows themselves.
    """
    sequences, images = prints["sequences"].to_numpy(), prints["images"].to_numpy()
    hidden = {image for place in held_out for image in images[place]}
    places = defaultdict(list)  # of the held-out rows that have a sequence
    for place in held_out:
        for sequence in sequences[place].tolist():
            places[sequence].append(place)

    def is_near(place: int) -> bool:
        if hidden:
            return not hidden.isdisjoint(images[place])
        words = sequences[place].tolist()
        shared = Counter(other for each in words if each in places for other in places[each])
        return any(
            count >= ALIKE * (len(words) + len(sequences[other]) - count)
            for other, count in shared.items()
        )

    leaks = np.array([is_near(place) for place in range(len(prints))], dtype=bool)
    leaks[held_out] = False
    return leaks
