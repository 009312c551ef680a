"""Find the reference answer in a cell of a row, and test whether it has the required kind."""

import ast
import json
import re
import string
from collections.abc import Callable, Sequence
from typing import Any

from grpo_nb import answers
from grpo_nb.answers import extract_boxed, extract_hash_answer
from grpo_nb.answers.forms import TAGS
from grpo_nb.names import refuse_unknown

FORMATS: dict[str, Callable[[str], str | None]] = {
    "auto": lambda text: extract_hash_answer(text) if "####" in text else text,
    "as_is": lambda text: text,
    "####": extract_hash_answer,
    "boxed": extract_boxed,
    "tag": TAGS.marked,
}


def answer_finder(answer_format: str) -> Callable[[Any], str]:
    r"""Return a function that finds the reference answer in a cell, or returns "" if it finds none.

    >>> answer_finder("regex:= (\\d+)")("2 + 2 = 4")
    '4'

    Raises:
        ValueError: The format is unknown, or its regular expression is invalid.
    """
    kind, _, detail = answer_format.partition(":")
    if kind == "regex" and detail:
        try:
            pattern = re.compile(detail, re.DOTALL)
        except re.error as error:
            raise ValueError(f"data.answer_format = {answer_format!r}: {error}") from None
        group = min(pattern.groups, 1)
        return lambda cell: as_text((m := pattern.search(as_text(cell))) and m[group])
    refuse_unknown("data.answer_format", answer_format, [*FORMATS, "regex:pattern"])
    return lambda cell: as_text(FORMATS[answer_format](as_text(cell)))


def as_text(cell: Any) -> str:
    """Return a cell as text: "" for None and NaN, JSON for lists and dicts.

    >>> as_text(85.0), as_text(float("nan")), as_text({"name": "Zoë"})
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


def printable(text: str) -> str:
    """Return the text with lone surrogates escaped, so that UTF-8 can encode it."""
    return text.encode(errors="backslashreplace").decode()


def letter_of(cell: Any, text: str, choices: Sequence[Any], labels: Sequence[Any] = ()) -> str:
    """Return the letter of the choice that an answer names, or "" if it names none.

    If the answer is a label, the letter of that choice is returned. Otherwise it may be a letter,
    the text of a choice, or a position, counted from 0. A number is always a position if all
    choices are strings.

    >>> [letter_of(cell, str(cell), ["4", "1", "red"]) for cell in (1, "1", "c", "red", "2", 9)]
    ['B', 'B', 'C', 'C', 'C', '']

    Raises:
        ValueError: The answer can be read in two ways that name different choices.
    """
    letters = string.ascii_uppercase[: len(choices)]
    ways = {}
    if text in (names := [as_text(label) for label in labels][: len(letters)]):
        return letters[names.index(text)]
    if len(text) == 1 and text.upper() in letters:
        ways[text.upper()] = "its letter"
    if not isinstance(cell, int | float) or not all(isinstance(one, str) for one in choices):
        texts = [as_text(choice) for choice in choices]
        ways |= {letters[texts.index(text)]: "its text"} if text in texts else {}
    if text.isdecimal() and len(text) < 3 and int(text) < len(letters):
        ways[letters[int(text)]] = "its place, counted from 0"
    if len(ways) > 1:
        readings = " and ".join(f"choice {letter} by {way}" for letter, way in ways.items())
        raise ValueError(f"{text!r} is {readings}")
    return next(iter(ways), "")


def mathematics(answer: str) -> tuple[str, Any]:
    r"""Return the kind of a reference answer, which decides how it is compared, and its value.

    >>> mathematics(r"$(1, 2\pi]$"), mathematics("-18")
    (('interval', '(1,2\\pi]'), ('number', Fraction(-18, 1)))

    Raises:
        ValueError: The reference could match only its own text; the message gives the reason.
    """
    reference = answers.read_reference(answer)
    if fault := answers.unusable(reference):
        raise ValueError(fault)
    spaceless = "".join(reference.text.split())
    return reference.kind, spaceless if reference.number is None else reference.number


PLAIN: dict[str, Callable[[str], Any]] = {
    "number": answers.parse_number,
    "math": mathematics,
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
