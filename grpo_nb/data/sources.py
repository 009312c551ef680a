"""Read rows from every kind of source, one by one, and find their columns.

A row is {"question": "What is 47 + 38?", "answer": "85"}, with all columns of the source. A line
that cannot be read is replaced by a string with the reason, so that it can be reported.
"""

import csv
import json
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data import gym
from grpo_nb.files import project_path, read_yaml
from grpo_nb.names import refuse_unknown

if TYPE_CHECKING:
    from grpo_nb.runs.config import DataConfig

BATCH = 500  # rows read or written at once; also the rows whose columns are looked at
FILES = sorted(project_path("data/tasks").glob("*.jsonl"))
BUILT_IN = {path.stem: f"data/tasks/{path.name}" for path in FILES}
BUILT_IN["arithmetic"] = "data/arithmetic.jsonl"
REMEDIES = read_yaml(Path(__file__).with_name("remedies.yaml"))  # {reason: what to do}
Row = dict[str, Any]
Options = Any  # an object with the arguments of `prepare` as attributes, such as a run's DataConfig


class Fault(Exception):
    """Report why a row cannot be used, and what to do about it."""

    def __init__(self, reason: str, column: str, value: str) -> None:
        self.reason, self.row = reason, 0  # the row's number is set later
        self.column, self.value = column, value

    @property
    def evidence(self) -> str:
        """Return a message that names the row, the column, the reason and the value."""
        where = f"row {self.row}" + (f", column {self.column!r}" if self.column else "")
        return f"{where}: {self.reason}: {self.value}"

    def __str__(self) -> str:
        return f"{self.evidence}. Remedy: {REMEDIES[self.reason]}"


def changed(config: "Options | DataConfig", **changes: Any) -> Options:
    """Return the options with these changes."""
    return SimpleNamespace(**vars(config) | changes)


def read(config: Options) -> Iterator[tuple[int, Row | str]]:
    """Yield rows with their numbers, from 1; in JSON Lines these are line numbers.

    `source` names a built-in set, a local file (READERS), a folder, a hub dataset, or tasks of
    reasoning-gym.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The source cannot be read; the message gives the remedy.
    """
    numbered = ((n, row) for n, row in enumerate(_open(config), start=1) if row is not None)
    return islice(numbered, config.max_rows or None)


def read_columns(config: Options) -> tuple[Options, list[str], Iterator[tuple[int, Row | str]]]:
    """Find the columns of questions, answers and images.

    Returns:
        The options, in which `image_column` is "" if there are no images; the names of all columns;
        and the rows.

    Raises:
        ValueError: There are no rows, or a column is missing.
    """
    rows = read(config)
    if not (first := list(islice(rows, BATCH))):
        raise ValueError(f"{config.source} holds no rows: give a data.source that does")
    names = list(dict.fromkeys(name for _, row in first if isinstance(row, dict) for name in row))
    if config.image_column == "images" and "images" not in names:
        config = changed(config, image_column="image" if "image" in names else "")
    for setting in ("question_column", "answer_column", "image_column"):
        if names and (column := getattr(config, setting)):
            refuse_unknown(f"column of {config.source} (data.{setting})", column, names)
    return config, names, chain(first, rows)


def is_local(source: str) -> bool:
    """Return whether a source is a file of rows, not a built-in set, a folder or a hub dataset."""
    return source not in BUILT_IN and Path(source).suffix.lower() in READERS


def folder_of(config: Options) -> Path | None:
    """Return the folder in which a source lies; None for a dataset on the hub."""
    path = _places(config)[0]
    return path if path.is_dir() else path.parent if path.is_file() else None


def _places(config: Options) -> list[Path]:
    """Return the paths that a source may refer to, existing ones first."""
    name = BUILT_IN.get(config.source, config.source)
    # A notebook's kernel runs in the notebook's folder, so commands look for files there too.
    folders = (Path.cwd(), project_path("notebooks"), project_path(""))
    places = dict.fromkeys(folder / name for folder in folders)
    return sorted(places, key=lambda path: not path.exists())


def _open(config: Options) -> Iterator[Row | str | None]:
    if gym.is_gym(config.source):
        return gym.rows(config)
    path, *others = _places(config)
    reader = READERS.get(path.suffix.lower())
    if path.is_file() and reader:
        return _read_file(path, reader)
    if reader and not path.is_dir():
        places = ", nor ".join(map(str, [path, *others]))
        raise FileNotFoundError(
            f"data.source = {config.source!r}: there is no {places}; name a file that is there"
        )
    if path.is_file():
        raise ValueError(f"{path}: unknown file type; its name must end in {', '.join(READERS)}")
    if "/" not in config.source and not path.is_dir():
        refuse_unknown("data.source", config.source, list(BUILT_IN))
    return _read_hub(str(path) if path.is_dir() else config.source, config)


def _read_file(path: Path, reader: Any) -> Iterator[Row | str | None]:
    """Yield the rows of a file.

    Raises:
        ValueError: It is damaged, a quotation mark is not closed, or a line has more cells than the
            header.
    """
    try:
        yield from reader(path)
    except (ValueError, RecursionError, pd.errors.ParserWarning, pa.ArrowException, OSError) as e:
        raise ValueError(
            f"{path} cannot be read ({str(e).strip()}): correct that line, its quotation marks or "
            "its separators, or copy the file again"
        ) from None


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a table, as text; its header shows what separates the cells."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:  # U+FFFD is reported later
        first, usual = file.readline(), "\t" if path.suffix.lower() == ".tsv" else ","
        file.seek(0)
        mark = next((mark for mark in (usual, ",", ";", "\t") if mark in first), usual)
        table = {"sep": mark, "dtype": str, "index_col": False, "keep_default_na": False}
        if any(next(csv.reader([first], delimiter=mark), [])):
            for chunk in pd.read_csv(file, chunksize=BATCH, **table):
                yield from chunk.fillna("").to_dict("records")


def _read_json(path: Path) -> Iterator[Row | str | None]:
    """Yield the objects of a JSON Lines file (None for a blank line), or of a JSON array."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first = file.read(1000).lstrip()
        file.seek(0)
        if path.suffix.lower() == ".json" and first.startswith("["):
            return (yield from map(_object, json.load(file)))
        for line in map(str.strip, file):
            try:
                yield _object(json.loads(line)) if line else None
            except (ValueError, RecursionError) as error:
                yield f"not JSON ({error}): {line[:80]!r}"


def _object(value: Any) -> Row | str:
    return value if isinstance(value, dict) else f"not an object: {value!r:.80}"


def _read_parquet(path: Path) -> Iterator[Row]:
    for batch in pq.ParquetFile(path).iter_batches(BATCH):
        yield from batch.to_pylist()


def _read_hub(name: str, config: Options) -> Iterator[Row]:
    import datasets

    place = {"split": config.split, "revision": config.revision or None}
    try:
        rows = datasets.load_dataset(
            name, config.subset or None, streaming=config.streaming, **place
        )
        rows = rows if config.streaming else rows.to_iterable_dataset()
        yield from rows.decode(False) if rows.features else rows
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.source = {name!r} (subset {config.subset!r}, {place}) could not be loaded: "
            f"{error}. Check the names and the network, or use a local copy: "
            "`hf download --repo-type dataset NAME --local-dir FOLDER`, then data.source=FOLDER"
        ) from error


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv}
READERS[".parquet"] = _read_parquet
