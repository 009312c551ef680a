"""Turn a raw row into a prepared row, or report why it cannot be used; write and read such rows.

A prepared row is {"prompt": [system, user], "question": "What is 47 + 38?", "answer": "85"} plus
the columns for the rewards. A raw row has a question and an answer, under any names. Its question
may be a chat (a list of {"role", "content"}), whose turns are not changed. The row may also have:

- `choices`: listed below the question as A, B, C…; the answer becomes a letter;
- `tests`: passed on to code rewards;
- `entry`: passed on to the reward of a generated row;
- `level`: 2, or "gcd 2": passed on to `training.difficulty` and to the evaluation;
- images (`data.image_column`): the prepared row has a list of PIL images under "images", and the
  content of the last turn of its prompt is a list of parts: the images, then the text.

Prepared rows are stored in one Parquet file per split. The columns for the rewards are stored as
JSON, so a scalar, list or dict is read as it was written. Its type may differ between rows, which
Arrow's own columns do not allow. Images are stored as PNG files in a column of their own, and the
prompts without them.
"""

import ast
import json
import re
import string
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb import answers
from grpo_nb.answers.forms import TAGS
from grpo_nb.data.images import decode, encode, read_images
from grpo_nb.data.sources import Fault, Options, Row, folder_of
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards.contract import TRLS_OWN
from grpo_nb.rewards.prompts import Message, as_text, build_prompt, with_images

if TYPE_CHECKING:
    from grpo_nb.runs import Run

CountTokens = Callable[[Sequence[list[Message]]], list[int]]
AS_THEY_ARE = ("prompt", "question", "answer", "prompt_tokens", "images")  # all others: JSON
SHAPE_COLUMNS = ("choices", "tests", "entry", "level")  # passed on
TAKEN = {"prompt", "question", "answer", "prompt_tokens", "worked", "self", *TRLS_OWN}
TAKEN |= {"completion", "environments", "image", "images"}  # names that TRL uses
PARTS = {"role", "content"}  # of a turn
MISSING, TYPE, EMPTY = "column missing", "wrong type", "empty"
KIND, LONG = "answer not of its kind", "prompt too long"
TEMPLATE = "unfit for the chat template"
FORMATS: dict[str, Callable[[str], str | None]] = {
    "auto": lambda text: answers.extract_hash_answer(text) if "####" in text else text,
    "as_is": lambda text: text,
    "####": answers.extract_hash_answer,
    "boxed": answers.extract_boxed,
    "tag": TAGS.marked,
}


def prepare_row(raw: Row, config: Options) -> tuple[Row, Any]:
    """Return the prepared form of a row, and its reference answer in plain form.

    Raises:
        Fault: The row cannot be used.
    """
    question = _question(raw, config)
    cell = _cell(raw, config.answer_column)
    answer = answer_finder(config.answer_format)(cell)
    if config.answer_kind == "choice":
        answer = _letter(cell, answer, raw)
    plain = plain_answer(answer, config.answer_kind) if answer else None
    if plain is None:
        why = f"{cell_text(cell)[-60:]!r} holds no {config.answer_kind}"
        if answer and config.answer_kind == "math":
            why += f" that an answer can match: {answers.unusable(answers.read_reference(answer))}"
        raise Fault(KIND if cell_text(cell) else EMPTY, config.answer_column, why)
    names = [name.strip() for name in config.extra_columns.split(",") if name.strip()]
    if names == ["all"]:
        columns = {config.question_column, config.answer_column, config.image_column}
        names = sorted(raw.keys() - TAKEN - columns)
    columns = {name: raw[name] for name in SHAPE_COLUMNS if name in raw}
    columns |= {name: _cell(raw, name) for name in names}
    if config.sft_rows and "####" in str(cell):
        columns["worked"] = str(cell).partition("####")[0].strip()
    return columns | question | {"answer": answer}, plain


def prompt_tokens(prompt: list[Message], config: Options, count_tokens: CountTokens | None) -> int:
    """Return the number of tokens of a prompt, or 0 if `count_tokens` is None.

    Raises:
        Fault: The chat template refuses the prompt.
    """
    try:
        return count_tokens([prompt])[0] if count_tokens else 0
    except ValueError as error:
        raise Fault(TEMPLATE, config.question_column, str(error)) from None


@cache
def answer_finder(answer_format: str) -> Callable[[Any], str]:
    r"""Return a function that finds the reference answer in a cell, or returns "" if it finds none.

    >>> answer_finder("regex:= (\\d+)")("2 + 2 = 4")
    '4'

    Raises:
        ValueError: The format is unknown.
    """
    kind, _, detail = answer_format.partition(":")
    if kind == "regex" and detail:
        pattern = re.compile(detail, re.DOTALL)
        group = min(pattern.groups, 1)
        return lambda cell: cell_text((m := pattern.search(cell_text(cell))) and m[group])
    refuse_unknown("data.answer_format", answer_format, [*FORMATS, "regex:pattern"])
    return lambda cell: cell_text(FORMATS[answer_format](cell_text(cell)))


def cell_text(cell: Any) -> str:
    """Return a cell as text: "" for None and NaN, JSON for lists and dicts.

    >>> cell_text(85.0), cell_text(float("nan")), cell_text({"name": "Zoë"})
    ('85', '', '{"name": "Zoë"}')
    """
    if isinstance(cell, str):
        return cell.strip()
    if cell is None or cell != cell:
        return ""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    if isinstance(cell, list | dict):
        return json.dumps(cell, ensure_ascii=False, default=str)
    return str(cell)


def _mathematics(answer: str) -> tuple[str, Any]:
    """Return a reference answer's kind, which decides how it is compared, and its value."""
    reference = answers.read_reference(answer)
    if fault := answers.unusable(reference):
        raise ValueError(fault)
    spaceless = "".join(reference.text.split())
    return reference.kind, spaceless if reference.number is None else reference.number


PLAIN: dict[str, Callable[[str], Any]] = {
    "number": answers.parse_number,
    "math": _mathematics,
    "choice": str,
    "json": lambda answer: json.dumps(json.loads(answer), sort_keys=True),
    "code": lambda answer: ast.dump(ast.parse(answer)),
    "text": lambda answer: " ".join(answer.casefold().split()),
}


def plain_answer(answer: str, kind: str) -> Any:
    """Return a value that is the same for equal answers; None if the answer is not of this kind.

    >>> plain_answer("$1,875.00", "number"), plain_answer("about a dozen", "number")
    (Fraction(1875, 1), None)
    """
    try:
        return PLAIN[kind](answer)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _question(row: Row, config: Options) -> Row:
    prompt = _prompt(row, config.question_column, config.system_prompt)
    question = {"prompt": prompt, "question": prompt[-1]["content"]}
    if not (column := config.image_column):
        return question
    images = read_images(_cell(row, column), folder_of(config), column, config.image_pixels)
    return question | {"prompt": with_images(prompt, images), "images": images}


def _cell(row: Row, column: str) -> Any:
    if column not in row:
        raise Fault(MISSING, column, f"the row has {', '.join(map(str, row)) or 'nothing'}")
    return row[column]


def _prompt(row: Row, column: str, system_prompt: str) -> list[Message]:
    question = _cell(row, column)
    if not cell_text(question):
        raise Fault(EMPTY, column, repr(question))
    if isinstance(question, str):
        if row.get("choices"):
            lettered = zip(string.ascii_uppercase, map(cell_text, _choices(row)), strict=False)
            question += "".join(f"\n{letter}. {text}" for letter, text in lettered)
        return build_prompt(question, system_prompt)
    is_chat = isinstance(question, list) and all(isinstance(turn, dict) for turn in question)
    turns = question if is_chat else []
    turns = [{k: v for k, v in turn.items() if v or k in PARTS} for turn in turns]
    fits = all(turn.keys() == PARTS and set(map(type, turn.values())) == {str} for turn in turns)
    if not turns or not fits or turns[-1]["role"] != "user":
        raise Fault(TYPE, column, f"{question!r:.80}")
    if system_prompt and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system_prompt})
    return turns


def _letter(cell: Any, text: str, row: Row) -> str:
    """Return the letter of the choice that an answer names, or "" if it names none.

    An answer names a choice by its label, its letter, its index (counted from 0) or its text.
    """
    choices, cells = _choices(row), row["choices"]
    labels = list(map(cell_text, cells.get("label") or [])) if isinstance(cells, dict) else []
    letters = string.ascii_uppercase[: len(choices)]
    for names in (labels, letters, range(len(choices)), choices):
        for name, letter in zip(names, letters, strict=False):
            if name in (cell, text, text.upper()):
                return letter
    return ""


def _choices(row: Row) -> list[Any]:
    choices = _cell(row, "choices")
    if isinstance(choices, dict) and "text" in choices:  # as in the dataset ARC
        choices = choices["text"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(string.ascii_uppercase):
        raise Fault(TYPE, "choices", f"{choices!r:.80} is not a list of 2 to 26 choices")
    return choices


def pack(row: Row) -> Row:
    """Return a row as it is stored: its images as PNG files, its prompt as text."""
    images = {"images": list(map(encode, row["images"]))} if "images" in row else {}
    return row | {"prompt": as_text(row["prompt"])} | images


def unpack(row: Row) -> Row:
    """Return the row that `pack` stored, with its images decoded and put into its prompt."""
    if "images" not in row:
        return row
    images = list(map(decode, row["images"]))
    return row | {"images": images, "prompt": with_images(row["prompt"], images)}


def write_rows(path: Path, rows: Sequence[Row], names: Iterable[str] = ()) -> None:
    """Write packed rows to a Parquet file.

    Args:
        path: The file.
        rows: The rows, as `pack` returns them.
        names: Columns that the file has even if no row has them.
    """
    table = {name: [row[name] for row in rows] for name in AS_THEY_ARE if name in rows[0]}
    for name in dict.fromkeys(chain(names, *rows)):
        if name not in AS_THEY_ARE:
            table[name] = [json.dumps(row.get(name), default=str) for row in rows]
    pq.write_table(pa.table(table), path)


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """Return the first `max_rows` rows (0: all) of a Parquet file, with its JSON columns parsed.

    Images are decoded. Each takes three bytes of memory per pixel.
    """
    table = pq.read_table(path)
    rows = table.slice(0, max_rows or None).to_pylist()
    names = [name for name in table.column_names if name not in AS_THEY_ARE]
    return [unpack(row | {name: json.loads(row[name]) for name in names}) for row in rows]


def load(run: "Run", split: str, max_rows: int = 0) -> list[Row]:
    """Return the first `max_rows` rows (0: all) of "train", "sft" or "eval" from stage 01."""
    return read_rows(run / f"data/{split}.parquet", max_rows)
