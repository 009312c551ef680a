"""Turn a raw row into a prepared row, or report why it cannot be used.

A prepared row is {"prompt": [system, user], "question": "What is 47 + 38?", "answer": "85"} plus
the columns for the rewards. A raw row has a question and an answer, under any names. Its question
may be a chat (a list of {"role", "content"}), whose turns are not changed. The row may also have:

- `choices`: listed below the question as A, B, C…; the answer becomes a letter;
- `context` (a string) and `sources` (a list): put above the question, sources numbered [1], [2]…;
- `tests`: passed on to code rewards;
- images (`data.image_column`): the prepared row has a list of PIL images under "images", and the
  content of the last turn of its prompt is a list of parts: the images, then the text.
"""

import re
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.answers import read_reference, unusable
from grpo_nb.data.faults import Fault
from grpo_nb.data.images import read_images
from grpo_nb.data.references import answer_finder, as_text, letter_of, plain_answer
from grpo_nb.data.sources import Batch, Row, folder_of, is_local, read_columns
from grpo_nb.rewards.contract import TRLS_OWN
from grpo_nb.rewards.prompts import Message, build_prompt, with_images

if TYPE_CHECKING:
    from grpo_nb.runs.config import DataConfig

FIRST_ROWS = 10
CountTokens = Callable[[Sequence[list[Message]]], list[int]]
SHAPE_COLUMNS = ("choices", "context", "sources", "tests")
TAKEN = {"prompt", "question", "answer", "prompt_tokens", "worked", "self", *TRLS_OWN}
TAKEN |= {"completion", "environments", "image", "images"}  # names that TRL uses
# U+FFFD, UTF-8 read as Latin-1 ("Ã©"), control characters, lone surrogates.
DAMAGED = re.compile("\ufffd|[ÃÂ][\u0080-\u00bf]|â€|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
UNREADABLE, MISSING, TYPE, EMPTY = "unreadable", "column missing", "wrong type", "empty"
KIND, TEXT, LONG = "answer not of its kind", "damaged text", "prompt too long"
TEMPLATE, CONTRADICTORY = "unfit for the chat template", "question with several answers"
AMBIGUOUS = "names two choices"


class ValidRow(NamedTuple):
    """Hold a prepared row, its number in the source and its reference answer in plain form."""

    number: int
    row: Row
    plain: Any


def validate_rows(
    batch: Batch, config: "DataConfig", count_tokens: CountTokens
) -> tuple[list[ValidRow], list[Fault], list[int]]:
    """Return the usable rows, the faults of the others, and the lengths of the measured prompts.

    Args:
        batch: Rows with their numbers.
        config: The settings as `sources.read_columns` returns them.
        count_tokens: Counts the tokens of prompts.
    """
    find_answer = answer_finder(config.answer_format)
    rows, faults, tokens = [], [], []
    for number, raw in batch:
        try:
            row, plain = _validate_row(raw, config, find_answer)
            tokens.append(prompt_tokens(row["prompt"], config, count_tokens))
            if tokens[-1] > config.max_prompt_tokens:
                limit = f"over data.max_prompt_tokens = {config.max_prompt_tokens}"
                raise Fault(LONG, "prompt", f"{tokens[-1]} tokens, {limit}")
            rows.append(ValidRow(number, row | {"prompt_tokens": tokens[-1]}, plain))
        except Fault as fault:
            fault.row = number
            faults.append(fault)
    return rows, faults, tokens


def refuse_unusable_rows(config: "DataConfig") -> None:
    """Refuse a local file before anything starts if most of its first rows cannot be used.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file or its columns cannot be read, or most of its first rows are faulty.
    """
    if not is_local(config.source):
        return
    config, _, batches = read_columns(config.model_copy(update={"max_rows": FIRST_ROWS}))
    rows = next(batches, [])
    faults = validate_rows(rows, config, lambda prompts: [0])[1]
    if 2 * len(faults) > len(rows):
        how_many = f"{len(faults)} of the first {len(rows)} rows of {config.source}"
        raise ValueError(f"{how_many} cannot be used: {faults[0]}")


def prompt_tokens(prompt: list[Message], config: "DataConfig", count_tokens: CountTokens) -> int:
    """Return the token count of a prompt, or raise a Fault if the chat template refuses it."""
    try:
        return count_tokens([prompt])[0]
    except ValueError as error:
        raise Fault(TEMPLATE, config.question_column, str(error)) from None


def row_to_ask(raw: Row | str, config: "DataConfig") -> Row:
    """Return a row for a model to answer, with the columns that the rewards read, if it has them.

    Without a usable reference answer, only the question is returned.

    Raises:
        Fault: The row has no question that can be asked, or an image that cannot be used.
    """
    question = _question(raw, config)
    try:
        return _validate_row(raw, config, answer_finder(config.answer_format))[0]
    except Fault:
        return question


def extra_columns(config: "DataConfig") -> list[str]:
    """Return the names in `data.extra_columns`.

    Raises:
        ValueError: Prepared rows or TRL already use one of these names.
    """
    names = [name.strip() for name in config.extra_columns.split(",") if name.strip()]
    if conflicts := TAKEN.intersection(names):
        raise ValueError(
            f"data.extra_columns: {min(conflicts)!r} is reserved by TRL or prepared rows: rename it"
        )
    return names


def _question(row: Row | str, config: "DataConfig") -> Row:
    if isinstance(row, str):
        raise Fault(UNREADABLE, "", row)
    prompt = _prompt(row, config.question_column, config.system_prompt)
    for turn in prompt:
        _refuse_damage(config.question_column, turn["content"])
    question = {"prompt": prompt, "question": prompt[-1]["content"]}
    if not (column := config.image_column):
        return question
    images = read_images(_cell(row, column), folder_of(config), column, config.image_pixels)
    return question | {"prompt": with_images(prompt, images), "images": images}


def _validate_row(
    row: Row | str, config: "DataConfig", find_answer: Callable[[Any], str]
) -> tuple[Row, Any]:
    question = _question(row, config)
    cell = _cell(row, config.answer_column)
    answer = find_answer(cell)
    if config.answer_kind == "choice":
        answer = _letter(cell, answer, row, config.answer_column)
    plain = plain_answer(answer, config.answer_kind) if answer else None
    if plain is None:
        why = f"{as_text(cell)[-60:]!r} holds no {config.answer_kind}"
        if answer and config.answer_kind == "math":
            why += f" that an answer can match: {unusable(read_reference(answer))}"
        raise Fault(KIND if as_text(cell) else EMPTY, config.answer_column, why)
    _refuse_damage(config.answer_column, answer)
    names = extra_columns(config)
    if names == ["all"]:
        columns = {config.question_column, config.answer_column, config.image_column}
        names = sorted(row.keys() - TAKEN - columns)
    for name in names:
        _refuse_damage(name, name)
    columns = {name: row[name] for name in SHAPE_COLUMNS if name in row}
    columns |= {name: _cell(row, name) for name in names}
    if config.sft_rows and "####" in str(cell):
        columns["worked"] = str(cell).partition("####")[0].strip()
    return question | {"answer": answer} | columns, plain


def _refuse_damage(column: str, text: str) -> None:
    if text.isascii() and text.isprintable():  # much faster than the search
        return
    if damage := DAMAGED.search(text):
        near = text[max(0, damage.start() - 20) : damage.end() + 20]
        raise Fault(TEXT, column, ascii(near))


def _cell(row: Row, column: str) -> Any:
    if column not in row:
        raise Fault(MISSING, column, f"the row has {', '.join(map(str, row)) or 'nothing'}")
    return row[column]


def _prompt(row: Row, column: str, system_prompt: str) -> list[Message]:
    question = _cell(row, column)
    if not as_text(question):
        raise Fault(EMPTY, column, repr(question))
    if isinstance(question, str):
        return build_prompt(_with_shape(row, question), system_prompt)
    try:
        turns = [{key: turn[key] for key in ("role", "content")} for turn in question]
        more = {key for turn in question for key in turn if turn[key] and key not in turns[0]}
    except (TypeError, KeyError):
        turns, more = [], set()
    if more:
        raise Fault(TYPE, column, f"a turn has {', '.join(sorted(more))} besides role and content")
    texts = [text for turn in turns for text in turn.values()]
    if not turns or turns[-1]["role"] != "user" or not all(isinstance(t, str) for t in texts):
        raise Fault(TYPE, column, f"{question!r:.80}")
    if system_prompt and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system_prompt})
    return turns


def _with_shape(row: Row, question: str) -> str:
    """Return the question with the row's context, sources and choices around it."""
    if row.get("choices"):
        lettered = zip(string.ascii_uppercase, map(as_text, _choices(row)), strict=False)
        question += "".join(f"\n{letter}. {text}" for letter, text in lettered)
    if row.get("sources"):
        numbered = enumerate(_typed(row["sources"], "sources", list), start=1)
        question = "\n".join(f"[{n}] {text}" for n, text in numbered) + "\n\n" + question
    if row.get("context"):
        question = _typed(row["context"], "context", str) + "\n\n" + question
    return question


def _letter(cell: Any, answer: str, row: Row, column: str) -> str:
    labels = row["choices"].get("label") if isinstance(row.get("choices"), dict) else None
    try:
        return letter_of(cell, answer, _choices(row), _typed(labels or [], "choices", list))
    except ValueError as error:
        raise Fault(AMBIGUOUS, column, str(error)) from None


def _choices(row: Row) -> list[Any]:
    choices = _cell(row, "choices")
    if isinstance(choices, dict) and "text" in choices:  # as in the dataset ARC
        choices = choices["text"]
    if not 2 <= len(_typed(choices, "choices", list)) <= len(string.ascii_uppercase):
        raise Fault(TYPE, "choices", f"{len(choices)} choices; 2 to 26 are supported")
    return choices


def _typed(cell: Any, column: str, kind: type) -> Any:
    if not isinstance(cell, kind):
        raise Fault(TYPE, column, f"{cell!r:.80} is not a {kind.__name__}")
    return cell
