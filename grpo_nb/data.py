"""Rows for training: read from a source, validated, measured, and split without leakage.

A prepared row: {"prompt": [system, user], "question": "What is 47 + 38?", "answer": "85"}.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_nb.config import DataConfig, refuse_unknown
from grpo_nb.numbers import parse_number
from grpo_nb.prompts import Message, build_prompt, extract_hash_answer
from grpo_nb.runs import Run, atomic_path, project_path, write_json

BUILT_IN = {"arithmetic": "data/arithmetic.jsonl"}
SHOWN_ROWS = 5  # faulty rows named in one error
Row = dict[str, Any]


def read_rows(config: DataConfig) -> list[Row]:
    """Rows of a built-in set, a local .jsonl file, or a hub dataset (or its local copy).

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is empty or not JSON lines, or no source has that name.
    """
    path = project_path(BUILT_IN.get(config.source, config.source))
    if path.suffix in (".jsonl", ".json"):
        rows = read_jsonl(path)
    elif "/" in config.source or path.is_dir():
        rows = _read_hub(str(path) if path.is_dir() else config.source, config)
    else:
        refuse_unknown("data.source", config.source, list(BUILT_IN))
    if not rows:
        raise ValueError(f"{config.source} holds no rows: point data.source at a file that does")
    return rows[: config.max_rows or None]


def read_jsonl(path: Path) -> list[Row]:
    """One JSON object a line; blank lines are passed over."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: set data.source to a .jsonl file")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            row = json.loads(line or "null")
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number}: not JSON ({error.msg}): {line[:80]!r}"
            ) from None
        if isinstance(row, dict):
            rows.append(row)
        elif row is not None:
            raise ValueError(f"{path}, line {number}: expected an object, got {line[:80]!r}")
    return rows


def _read_hub(name: str, config: DataConfig) -> list[Row]:
    import datasets

    try:
        loaded = datasets.load_dataset(name, config.subset or None, split=config.split)
    except (ValueError, FileNotFoundError, ConnectionError, OSError) as error:
        raise ValueError(
            f"data.source = {name!r} (subset {config.subset!r}, split {config.split!r}) could "
            f"not be loaded: {error}. Check the three names, or download it once and give a path"
        ) from error
    return loaded.to_list()


def gold_answer(raw: Any) -> str:
    """The gold as text: what follows `####` where that is used, else all of it."""
    text = str(raw)
    return (extract_hash_answer(text) or "") if "####" in text else text.strip()


def validate_rows(rows: Sequence[Row], config: DataConfig) -> list[Row]:
    """Prepared rows, in order.

    Raises:
        ValueError: Names the rows (from 1) without question or answer, or whose gold is
            no number, up to SHOWN_ROWS of them.
    """
    faults, prepared = [], []
    for number, row in enumerate(rows, start=1):
        question, raw = row.get(config.question_column), row.get(config.answer_column)
        if not isinstance(question, str) or not question.strip():
            faults.append(f"row {number} has no {config.question_column!r}: it has {sorted(row)}")
        elif raw is None or not str(raw).strip():
            faults.append(f"row {number} has no {config.answer_column!r}: it has {sorted(row)}")
        elif parse_number(gold_answer(raw)) is None:
            faults.append(f"row {number}: the gold {str(raw)[-60:]!r} is not a number")
        else:
            prompt = build_prompt(question, config.system_prompt)
            prepared.append({"prompt": prompt, "question": question, "answer": gold_answer(raw)})
    if faults:
        shown = "\n  ".join(faults[:SHOWN_ROWS])
        raise ValueError(
            f"{len(faults)} of {len(rows)} rows of {config.source} cannot be used:\n  {shown}\n"
            "Correct them, or name the columns with data.question_column and data.answer_column"
        )
    return prepared


def drop_duplicates(rows: Sequence[Row]) -> list[Row]:
    """The first row of each question, whatever its case and spacing.

    Done before the split, it leaves no prompt that is both trained on and held out.
    """
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(" ".join(row["question"].casefold().split()), row)
    return list(first.values())


def drop_long(
    rows: Sequence[Row], count_tokens: Callable[[list[Message]], int], max_prompt_tokens: int
) -> list[Row]:
    """Rows with their `prompt_tokens`, without those above the limit."""
    counted = [{**row, "prompt_tokens": count_tokens(row["prompt"])} for row in rows]
    return [row for row in counted if row["prompt_tokens"] <= max_prompt_tokens]


def split_rows(rows: Sequence[Row], eval_rows: int, seed: int) -> tuple[list[Row], list[Row]]:
    """(train, eval), shuffled by the seed.

    Raises:
        ValueError: Fewer rows than are to be held out, and one to train on.
    """
    if len(rows) <= eval_rows:
        raise ValueError(
            f"{len(rows)} rows are left and data.eval_rows = {eval_rows}: hold out fewer, or "
            "give more data"
        )
    shuffled = list(rows)
    random.Random(seed).shuffle(shuffled)
    return shuffled[eval_rows:], shuffled[:eval_rows]


def prepare(
    config: DataConfig, seed: int, count_tokens: Callable[[list[Message]], int]
) -> tuple[list[Row], list[Row], dict[str, int]]:
    """(train, eval, report): read, validate, drop what cannot be used, split.

    Args:
        config: Source, columns and limits.
        seed: Of the split.
        count_tokens: Tokens of a prompt as the model's chat template renders it.
    """
    raw = read_rows(config)
    rows = validate_rows(raw, config)
    unique = drop_duplicates(rows)
    short = drop_long(unique, count_tokens, config.max_prompt_tokens)
    if not short:
        raise ValueError(
            f"every prompt is longer than data.max_prompt_tokens = {config.max_prompt_tokens}: "
            "raise it, or shorten data.system_prompt"
        )
    train, held_out = split_rows(short, config.eval_rows, seed)
    report = {
        "rows_read": len(raw),
        "duplicates_removed": len(rows) - len(unique),
        "too_long_removed": len(unique) - len(short),
        "train_rows": len(train),
        "eval_rows": len(held_out),
        "longest_prompt_tokens": max(row["prompt_tokens"] for row in short),
    }
    return train, held_out, report


def save(run: Run, train: list[Row], held_out: list[Row], report: dict[str, int]) -> None:
    """Write data/{train,eval}.parquet and data/report.json."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, rows in (("train", train), ("eval", held_out)):
        with atomic_path(run / f"data/{split}.parquet") as temporary:
            pq.write_table(pa.Table.from_pylist(rows), temporary)
    write_json(run / "data/report.json", report)


def load(run: Run, split: str) -> list[Row]:
    """The rows of "train" or "eval" that stage 01 wrote."""
    import pyarrow.parquet as pq

    return pq.read_table(run / f"data/{split}.parquet").to_pylist()
