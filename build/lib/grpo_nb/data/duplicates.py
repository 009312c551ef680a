"""Use hashes to find questions that occur twice: exactly, nearly, or with different answers.

Words are compared in lower case and in normalized Unicode, without punctuation or thousands
separators. In scripts without spaces each character counts as a word. Near-duplicates have the same
numbers and operators and, by MinHash's estimate, share most sequences of three words. "What is
47 + 38?" and "What is 47 + 39?" are therefore two different questions.
"""

import json
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from grpo_nb.data.validate import ValidRow
from grpo_nb.rewards.prompts import Message, digest, message_text

PERMUTATIONS = 32  # MinHashes per question
NOT_COMPARED = ("prompt", "question", "prompt_tokens", "images")
ALIKE = 0.7  # rows with at least this share of equal MinHashes are near-duplicates
ONE_FORM = {0xFF01 + place: 0x21 + place for place in range(94)}  # full-width letters and digits
ONE_FORM |= str.maketrans("−–×⁄÷’", "--*//'")
SIGN = re.compile(r"[^\x00-\x7f\w\s]")
GROUPED = re.compile(r"\d(?<!\d\d)\d{0,2}(?:[,' ]\d{3})+(?!\d)")
# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(
    rf"[a-z]++(?![^\x00-\x7f])|[^\W\d_{_UNSPACED}]+|\.?\d+(?:\.\d+)*|[{_UNSPACED}]|[^\x00-\x7f\w\s]"
    r"|(?<=[\w)\s])[-+*/^=<>%](?=\s*[\d(])"
)
_COUNTS = """one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety
hundred thousand million billion half third quarter twice double triple dozen"""
COUNTS = frozenset(_COUNTS.split())


def fingerprints(rows: Sequence[ValidRow], columns: bool = False) -> pd.DataFrame:
    """Return the fingerprints of rows: hashes that are equal or similar if the rows are.

    Args:
        rows: The rows.
        columns: Whether extra columns count as part of the question, as with an environment.

    Returns:
        A table with the fingerprints of each row: row (its number in the source); hashes of
        question (with its images), answer, and numbers; the MinHashes 0, 1, …; and images (a tuple
        of hashes).
    """
    from rensa import RMinHash

    keys = [_key(one.row["prompt"]) for one in rows]
    if columns:
        others = [{k: v for k, v in one.row.items() if k not in NOT_COMPARED} for one in rows]
        keys = [f"{key} {json.dumps(c, default=str)}" for key, c in zip(keys, others, strict=True)]
    images = [tuple(hash(digest(each)) for each in one.row.get("images", ())) for one in rows]
    words = list(map(_words, keys))
    hashes = {
        "row": [one.number for one in rows],
        "question": [hash(pair) for pair in zip(keys, images, strict=True)],
        "answer": [hash(repr(one.plain)) for one in rows],  # hash(-1) equals hash(-2)
        "numbers": [hash(tuple(filter(_counts, text))) for text in words],
    }
    runs = [
        [" ".join(run) for run in zip(text, text[1:], text[2:], strict=False)] or [" ".join(text)]
        for text in words
    ]
    minhashes = RMinHash.digest_matrix_from_token_sets(runs, PERMUTATIONS, 0).to_rows()
    table = pd.DataFrame(minhashes, columns=range(PERMUTATIONS), dtype=np.uint32)
    columns = {name: np.array(column, np.int64) for name, column in hashes.items()}
    return table.assign(**columns, images=pd.Series(images, dtype=object))


@lru_cache(100_000)
def _counts(word: str) -> bool:
    """Return whether a word is a number or operator: changing it changes the problem."""
    if word.isalpha():
        return word in COUNTS or word[0].isnumeric()
    return unicodedata.category(word[-1])[0] != "M"  # M: marks, such as Hindi's vowel signs


def _key(prompt: Sequence[Message]) -> str:
    """Return the text of all turns except the system's, in normalized case, spacing and Unicode."""
    texts = [_without_marks(message_text(turn)) for turn in prompt if turn["role"] != "system"]
    return " ".join(" ".join(texts).casefold().split())


def _without_marks(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(ONE_FORM)
        text = SIGN.sub(lambda m: " " if unicodedata.category(m[0])[0] == "P" else m[0], text)
    return text


def _words(key: str) -> list[str]:
    """Return the words, numbers, operators and signs of a text, or the text if it has none."""
    text = GROUPED.sub(lambda number: re.sub(r"\D", "", number[0]), key)
    return WORD.findall(text) or [key]


def near(prints: pd.DataFrame, held_out: np.ndarray) -> np.ndarray:
    """Return which rows share an image with a held-out row, or are near-duplicates of one.

    If held-out rows have images, only images are compared, as rows often ask the same question.

    Args:
        prints: Fingerprints of the rows.
        held_out: Positions of the held-out rows.

    Returns:
        True or False for each row; False for the held-out rows themselves.
    """
    numbers, minhashes = prints["numbers"].to_numpy(), prints[range(PERMUTATIONS)].to_numpy()
    images = prints["images"].to_numpy()
    hidden = {image for place in held_out for image in images[place]}
    if hidden:
        leaks = np.array([not hidden.isdisjoint(each) for each in images])
        leaks[held_out] = False
        return leaks
    leaks = np.zeros(len(prints), dtype=bool)
    for place in held_out:
        rows = np.flatnonzero(numbers == numbers[place])
        leaks[rows] |= (minhashes[rows] == minhashes[place]).mean(axis=1) >= ALIKE
    leaks[held_out] = False
    return leaks
