"""Read the rows of a file, a folder, or a dataset on the hub, and find their columns.

A row is {"question": "What is 47 + 38?", "answer": "85"}, with all columns of the source.
"""

import json
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data import gym
from grpo_nb.files import project_path, read_yaml
from grpo_nb.names import refuse_unknown

SAVED = ("state.json", "dataset_dict.json")  # in a folder that `save_to_disk` wrote
FIRST_ROWS = 500  # whose columns are looked at
FILES = sorted(project_path("data/tasks").glob("*.jsonl"))
BUILT_IN = {path.stem: f"data/tasks/{path.name}" for path in FILES}
BUILT_IN["arithmetic"] = "data/arithmetic.jsonl"
REMEDIES = read_yaml(Path(__file__).with_name("remedies.yaml"))  # {reason: what to do}
Row = dict[str, Any]
Options = Any  # an object with the arguments of `prepare` as attributes, such as a run's DataConfig


class Fault(Exception):
    """Report in which column and why a row cannot be used; REMEDIES lists the reasons."""

    def __init__(self, reason: str, column: str, value: str) -> None:
        super().__init__(f"column {column!r}: {value}")
        self.reason = reason


def read(config: Options) -> Iterator[tuple[int, Row]]:
    """Return the rows with their numbers, which are counted from 1.

    `source` names a built-in set, a local file (READERS), a folder, a hub dataset, or tasks of
    reasoning-gym.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The source cannot be read; the message gives the remedy.
    """
    return islice(enumerate(_open(config), start=1), config.max_rows or None)


def read_columns(config: Options) -> tuple[list[str], Iterator[tuple[int, Row]]]:
    """Check the columns of questions, answers and images, and set `config.image_column`.

    Returns:
        The names of all columns, and the rows with their numbers.

    Raises:
        ValueError: There are no rows, or a column is missing.
    """
    rows = read(config)
    if not (first := list(islice(rows, FIRST_ROWS))):
        raise ValueError(f"{config.source} holds no rows: give a data.source that does")
    names = list(dict.fromkeys(name for _, row in first for name in row))
    if config.image_column == "images" and "images" not in names:
        config.image_column = "image" if "image" in names else ""
    for setting in ("question_column", "answer_column", "image_column"):
        if column := getattr(config, setting):
            refuse_unknown(f"column of {config.source} (data.{setting})", column, names)
    return names, chain(first, rows)


def folder_of(config: Options) -> Path | None:
    """Return the folder that a source is or lies in; None for a dataset on the hub."""
    path = _places(config)[0]
    return path if path.is_dir() else path.parent if path.is_file() else None


def _places(config: Options) -> list[Path]:
    """Return the paths that a source may refer to, existing ones first."""
    name = BUILT_IN.get(config.source, config.source)
    # A notebook's kernel runs in the notebook's folder, so commands look for files there too.
    folders = (Path.cwd(), project_path("notebooks"), project_path(""))
    places = dict.fromkeys(folder / name for folder in folders)
    return sorted(places, key=lambda path: not path.exists())


def _open(config: Options) -> Iterable[Row]:
    if (rows := getattr(config, "rows", None)) is not None:
        return rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    if gym.is_gym(config.source):
        return gym.rows(config)
    path, *others = _places(config)
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        is_saved = any((path / name).is_file() for name in SAVED)
        return _read_saved(path, config) if is_saved else _read_hub(str(path), config)
    if config.source not in BUILT_IN and path.suffix.lower() in READERS:
        places = ", nor ".join(map(str, [path, *others]))
        raise FileNotFoundError(
            f"data.source = {config.source!r}: there is no {places}; name a file that is there"
        )
    if "/" not in config.source:
        refuse_unknown("data.source", config.source, list(BUILT_IN))
    return _read_hub(config.source, config)


def _read_file(path: Path) -> list[Row]:
    """Return the rows of a file.

    Raises:
        ValueError: Its type is unknown, or it is damaged.
    """
    if not (reader := READERS.get(path.suffix.lower())):
        raise ValueError(f"{path}: unknown file type; its name must end in {', '.join(READERS)}")
    try:
        return reader(path)
    except pd.errors.EmptyDataError:
        return []
    except (ValueError, RecursionError, pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read ({str(error).strip()}): correct that line, its quotation marks "
            "or its separators, save it as UTF-8, or copy the file again"
        ) from None


def _read_table(path: Path, separator: str) -> list[Row]:
    """Return the rows of a CSV or TSV file, with every cell as text."""
    options = {"sep": separator, "dtype": str, "index_col": False, "keep_default_na": False}
    return pd.read_csv(path, **options).fillna("").to_dict("records")


def _read_json(path: Path) -> list[Row]:
    """Return the objects of a file of JSON Lines, or of one JSON array."""
    text = path.read_text("utf-8-sig").strip()
    if not text.startswith("["):  # lines become an array, so that an error names its line
        text = "[" + ",\n".join(line for line in text.split("\n") if line.strip()) + "]"
    rows = json.loads(text)
    if others := [row for row in rows if not isinstance(row, dict)]:
        raise ValueError(f"not an object: {others[0]!r:.80}")
    return rows


def _read_hub(name: str, config: Options) -> Iterator[Row]:
    import datasets

    rows = datasets.load_dataset(
        name,
        config.subset or None,
        split=config.split,
        revision=config.revision or None,
        streaming=config.streaming,
    )
    rows = rows if config.streaming else rows.to_iterable_dataset()
    yield from rows.decode(False) if rows.features else rows


def _read_saved(path: Path, config: Options) -> Iterator[Row]:
    """Return the rows that `save_to_disk` has written: a dataset, or the split of several."""
    import datasets

    rows = datasets.load_from_disk(str(path))
    if isinstance(rows, datasets.DatasetDict):
        refuse_unknown("data.split", config.split, list(rows))
        rows = rows[config.split]
    yield from rows.to_iterable_dataset().decode(False)


READERS = {
    ".jsonl": _read_json,
    ".json": _read_json,
    ".csv": partial(_read_table, separator=","),
    ".tsv": partial(_read_table, separator="\t"),
    ".parquet": lambda path: pq.read_table(path).to_pylist(),
}
