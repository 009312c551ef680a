"""One raw row to one prepared row, or the reason why it cannot be used.

A prepared row: {"prompt": [system, user], "question": "What is 47 + 38?", "answer": "85"} and
the columns that are passed on to the rewards. The shapes a row may have:

- a question and an answer, under any column names; a text and its summary likewise;
- a chat (a list of {"role", "content"}) for a question: its turns are kept as they are;
- `choices`: put below the question as A, B, C…; the gold becomes a letter;
- `context` (a text) or `sources` (a list, numbered [1], [2]…): put above the question;
- `tests` of code: passed on.
"""

import re
import string
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from grpo_nb.config import DataConfig
from grpo_nb.data.golds import as_text, gold_finder, letter_of, plain_gold
from grpo_nb.data.sources import Row, Unreadable
from grpo_nb.prompts import Message, build_prompt

SHAPE_COLUMNS = ("choices", "context", "sources", "tests")
OURS = ("prompt", "question", "answer", "prompt_tokens", "worked")
TRL_OWN = ("prompts", "completion", "completions", "completion_ids", "trainer_state", "images")
# U+FFFD, UTF-8 read as Latin-1 ("Ã©"), control characters, halves of surrogate pairs.
DAMAGED = re.compile("\ufffd|[ÃÂ][\u0080-\u00bf]|â€|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
UNREADABLE, MISSING, TYPE, EMPTY = "unreadable", "column missing", "wrong type", "empty"
GOLD, TEXT, LONG = "gold not of its kind", "damaged text", "prompt too long"
REMEDIES = {
    UNREADABLE: "correct the line",
    MISSING: "name the columns with data.question_column, data.answer_column, data.extra_columns",
    TYPE: "make it a text, or a chat that ends with the user's turn",
    EMPTY: "fill the cell, or leave the row out",
    GOLD: "say where the gold stands with data.answer_format, what it is with data.answer_kind",
    TEXT: "read the source in the encoding it was written in, and save it as UTF-8",
    LONG: "raise data.max_prompt_tokens and model.max_seq_length as far as the model's context",
}


class Fault(NamedTuple):
    """Why a row cannot be used."""

    row: int
    reason: str
    column: str
    value: str

    def __str__(self) -> str:
        where = f"row {self.row}" + (f", column {self.column!r}" if self.column else "")
        return f"{where}: {self.reason}: {self.value}. Remedy: {REMEDIES[self.reason]}"


class Unusable(Exception):
    """Its arguments are reason, column and value of a Fault."""


class Checked(NamedTuple):
    """A prepared row, with its number in the source and its gold in plain form."""

    number: int
    row: Row
    gold: str


def check_rows(
    numbered: Iterable[tuple[int, Row | Unreadable]], config: DataConfig, system_prompt: str
) -> tuple[list[Checked], list[Fault]]:
    """The rows that can be used, and the faults of the others."""
    check = partial(
        _check_row,
        config=config,
        system_prompt=system_prompt,
        find_gold=gold_finder(config.answer_format),
        extra=[name.strip() for name in config.extra_columns.split(",") if name.strip()],
    )
    good, faults = [], []
    for number, row in numbered:
        try:
            good.append(Checked(number, *check(row)))
        except Unusable as fault:
            faults.append(Fault(number, *fault.args))
    return good, faults


def check_columns(config: DataConfig) -> None:
    """Raise ValueError if an extra column has a name that the prepared rows or TRL use."""
    taken = {name.strip() for name in config.extra_columns.split(",")} & {*OURS, *TRL_OWN}
    if taken:
        raise ValueError(
            f"data.extra_columns names {min(taken)!r}, a name that is taken: rename the column"
        )


def _check_row(
    row: Row | Unreadable,
    config: DataConfig,
    system_prompt: str,
    find_gold: Callable[[Any], str],
    extra: list[str],
) -> tuple[Row, str]:
    if isinstance(row, Unreadable):
        raise Unusable(UNREADABLE, "", str(row))
    prompt = _prompt(row, config.question_column, system_prompt)
    cell = _cell(row, config.answer_column)
    gold = find_gold(cell)
    if config.answer_kind == "choice":
        gold = letter_of(cell, gold, _choices(row))
    plain = plain_gold(gold, config.answer_kind) if gold else None
    if plain is None:
        why = f"{as_text(cell)[-60:]!r} holds no {config.answer_kind}"
        raise Unusable(GOLD if as_text(cell) else EMPTY, config.answer_column, why)
    for column, text in [
        *((config.question_column, turn["content"]) for turn in prompt),
        (config.answer_column, gold),
    ]:
        if damage := DAMAGED.search(text):
            near = text[max(0, damage.start() - 20) : damage.end() + 20]
            raise Unusable(TEXT, column, ascii(near))
    if extra == ["all"]:
        mapped = (config.question_column, config.answer_column, *OURS, *TRL_OWN)
        passed = {name: value for name, value in row.items() if name not in mapped}
    else:
        passed = {name: row[name] for name in SHAPE_COLUMNS if name in row}
        passed |= {name: _cell(row, name) for name in extra}
    if config.priming_rows and "####" in str(cell):
        passed["worked"] = str(cell).partition("####")[0].strip()
    return {"prompt": prompt, "question": prompt[-1]["content"], "answer": gold} | passed, plain


def _cell(row: Row, column: str) -> Any:
    if column not in row:
        raise Unusable(MISSING, column, f"the row has {', '.join(map(str, row)) or 'nothing'}")
    return row[column]


def _prompt(row: Row, column: str, system_prompt: str) -> list[Message]:
    question = _cell(row, column)
    if not as_text(question) or question == []:
        raise Unusable(EMPTY, column, repr(question))
    if isinstance(question, str):
        return build_prompt(_with_shape(row, question), system_prompt)
    if not _is_chat(question):
        raise Unusable(TYPE, column, f"{question!r:.80}")
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in question]
    if system_prompt and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system_prompt})
    return turns


def _is_chat(turns: Any) -> bool:
    keys = ("role", "content")
    return (
        isinstance(turns, list)
        and all(isinstance(turn, dict) for turn in turns)
        and all(isinstance(turn.get(key), str) for turn in turns for key in keys)
        and turns[-1]["role"] == "user"
    )


def _with_shape(row: Row, question: str) -> str:
    """The question with what the row's shape adds above and below it."""
    parts = [question]
    if row.get("sources"):
        sources = _list_of(row, "sources")
        parts.insert(0, "\n".join(f"[{n}] {text}" for n, text in enumerate(sources, start=1)))
    if row.get("context"):
        if not isinstance(row["context"], str):
            raise Unusable(TYPE, "context", f"{row['context']!r:.80}")
        parts.insert(0, row["context"])
    if row.get("choices"):
        lettered = zip(string.ascii_uppercase, _choices(row), strict=False)
        parts[-1] += "\n" + "\n".join(f"{letter}. {text}" for letter, text in lettered)
    return "\n\n".join(parts)


def _choices(row: Row) -> list[str]:
    choices = _cell(row, "choices")
    if isinstance(choices, dict) and "text" in choices:  # as ARC has them
        row = {"choices": choices["text"]}
    found = [as_text(choice) for choice in _list_of(row, "choices")]
    if not 2 <= len(found) <= len(string.ascii_uppercase):
        raise Unusable(TYPE, "choices", f"{len(found)} choices")
    return found


def _list_of(row: Row, column: str) -> list[Any]:
    if not isinstance(row[column], list):
        raise Unusable(TYPE, column, f"{row[column]!r:.80} is no list")
    return row[column]


def drop_long(
    checked: Sequence[Checked], tokens: Sequence[int], limit: int
) -> tuple[list[Checked], list[Fault]]:
    """The rows whose prompts fit, with their `prompt_tokens`, and the faults of the others."""
    fit, faults = [], []
    for one, length in zip(checked, tokens, strict=True):
        one.row["prompt_tokens"] = length
        if length <= limit:
            fit.append(one)
        else:
            why = f"{length} tokens, where data.max_prompt_tokens is {limit}"
            faults.append(Fault(one.number, LONG, "prompt", why))
    return fit, faults
