"""Split rows so that no question is in two splits; leave out repeats and contradictions.

Words are compared in lower case and without punctuation or thousands separators. In scripts without
spaces each character counts as a word. Near-duplicates have the same numbers and operators, and
share most sequences of three words. "What is 47 + 38?" and "What is 47 + 39?" are therefore two
different questions.
"""

import json
import random
import re
import unicodedata
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd

from grpo_nb.data.sources import Row
from grpo_nb.rewards.prompts import digest, message_text

REPEATED, LEAKS = "question repeated", "nearly a held-out question"
CONTRADICTORY = "question with several answers"
NOT_COMPARED = ("prompt", "question", "prompt_tokens", "images")
ALIKE = 0.7  # rows that share at least this part of their sequences of words are near-duplicates
# Thai, Lao, Burmese, Khmer, Japanese and Chinese are written without spaces.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(rf"\d+(?:\.\d+)*|[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+|[-+*/%^=<>$€£]")
ONE_FORM = {0xFF01 + place: 0x21 + place for place in range(94)}  # full-width letters and digits
ONE_FORM |= str.maketrans("−–×⁄÷’", "--*//'")


def fingerprint(row: Row, plain: Any, columns: bool = False) -> dict[str, Any]:
    """Return the fingerprint of a row: values that are equal for equal rows.

    Args:
        row: A prepared row.
        plain: Its reference answer in plain form.
        columns: Whether extra columns count as part of the question, as with an environment.

    Returns:
        question (with its images) and answer, as hashes; sequences (one hash per three words in a
        row, hashed together with all numbers of the question); and images (a tuple of hashes).
    """
    texts = [message_text(turn) for turn in row["prompt"] if turn["role"] != "system"]
    key = unicodedata.normalize("NFC", " ".join(texts)).translate(ONE_FORM)
    key = " ".join(key.casefold().split())
    if columns:
        others = {name: cell for name, cell in row.items() if name not in NOT_COMPARED}
        key += f" {json.dumps(others, default=str)}"
    images = tuple(hash(digest(image)) for image in row.get("images", ()))
    words = WORD.findall(re.sub(r"(?<=\d)[,' ](?=\d{3}(?!\d))", "", key)) or [key]
    numbers = tuple(word for word in words if not word.isalpha())
    threes = [*zip(words, words[1:], words[2:], strict=False)] or [tuple(words)]
    return {
        "question": hash((key, images)),
        "answer": hash(repr(plain)),  # hash(-1) equals hash(-2), so answers are hashed as texts
        "sequences": np.fromiter({hash((numbers, three)) for three in threes}, np.int64),
        "images": images,
    }


def near(prints: pd.DataFrame, held_out: np.ndarray) -> np.ndarray:
    """Return which rows share an image with a held-out row, or are near-duplicates of one.

    If held-out rows have images, only images are compared: such rows often ask the same question.

    Args:
        prints: A line per row, as `fingerprint` returns it.
        held_out: Positions of the held-out rows.

    Returns:
        True or False for each row; False for the held-out rows themselves.
    """
    images, leaks = prints["images"], np.zeros(len(prints), dtype=bool)
    if hidden := {image for images in images.iloc[held_out] for image in images}:
        leaks[:] = [not hidden.isdisjoint(each) for each in images]
    else:
        sizes = prints["sequences"].map(len).to_numpy(int)
        hashes = np.fromiter(chain.from_iterable(prints["sequences"]), np.int64)
        words = pd.DataFrame({"row": np.arange(len(prints)).repeat(sizes), "words": hashes})
        pairs = words.merge(words[words["row"].isin(held_out)], on="words")
        shared = pairs.value_counts(["row_x", "row_y"]).rename("shared").reset_index()
        total = sizes[shared["row_x"]] + sizes[shared["row_y"]] - shared["shared"]
        leaks[shared["row_x"][shared["shared"] >= ALIKE * total]] = True
    leaks[held_out] = False
    return leaks


def split_rows(
    table: pd.DataFrame, *, eval_rows: int, eval_share: float, sft_rows: int, seed: int
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Hold rows out, and leave out repeated, contradictory and leaked rows.

    Args:
        table: A line per row, as `fingerprint` returns it.
        eval_rows: How many rows are held out, at most.
        eval_share: The share of the rows that is held out, at most.
        sft_rows: How many training rows are set aside for the warm-up, at most half of them.
        seed: The seed of the order.

    Returns:
        The positions of the rows of each split ("train", "sft", "eval"), and of those left out for
        each reason.
    """
    conflicts = table.groupby("question")["answer"].transform("nunique").to_numpy() > 1
    repeats = table.duplicated("question").to_numpy() & ~conflicts
    rest = np.flatnonzero(~conflicts & ~repeats)
    order = rest.tolist()
    random.Random(seed).shuffle(order)
    # Rows with the same first image are put side by side, so that the split separates few of them.
    first_images = [(*table["images"].iloc[place], f"row {place}")[0] for place in order]
    ranks = pd.factorize(np.array(first_images, dtype=object))[0]
    order = np.array(order, dtype=int)[ranks.argsort(kind="stable")]
    held_out, train = np.split(order, [min(eval_rows, max(1, int(len(rest) * eval_share)))])
    leaks = near(table, held_out)
    lost = {CONTRADICTORY: conflicts, REPEATED: repeats, LEAKS: leaks & ~conflicts & ~repeats}
    train = train[~leaks[train]]
    # Warm-up rows are kept out of "train": they would make baseline and validation look better.
    train, warm_up = np.split(train, [len(train) - min(sft_rows, len(train) // 2)])
    splits = {"train": train, "sft": warm_up, "eval": held_out}
    left_out = {reason: np.flatnonzero(rows).tolist() for reason, rows in lost.items()}
    return {name: rows.tolist() for name, rows in splits.items()}, left_out
