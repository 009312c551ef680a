"""Read rows from every kind of source, in batches, and find their columns.

A row is {"question": "What is 47 + 38?", "answer": "85"}, with all columns of the source. A line
that cannot be read is replaced by a string with the reason, so that it can be reported.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from grpo_nb.files import project_path
from grpo_nb.names import refuse_unknown

if TYPE_CHECKING:
    import pyarrow as pa

    from grpo_nb.runs.config import DataConfig

BATCH = 500  # rows whose images are decoded at the same time
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # the first bytes of such a file
FILES = sorted(project_path("data/tasks").glob("*.jsonl"))
BUILT_IN = {path.stem: f"data/tasks/{path.name}" for path in FILES}
BUILT_IN["arithmetic"] = "data/arithmetic.jsonl"
# Names that a column may have. The first is the default; the others are tried if it is missing.
LIKELY = {
    "question_column": ("question", "prompt", "problem", "instruction", "input"),
    "answer_column": ("answer", "solution", "output", "label", "target"),
    "image_column": ("images", "image"),
}
SMALL = {"halffloat": np.float16, "float": np.float32}  # short floats by Arrow's type name
Row = dict[str, Any]
Batch = list[tuple[int, Row | str]]


def read(config: "DataConfig") -> Iterator[Batch]:
    """Yield batches of rows with their numbers, from 1; in JSON Lines these are line numbers.

    `data.source` names a built-in set, a local file (READERS), a folder, or a hub dataset.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The source cannot be read; the message gives the remedy.
    """
    numbered = ((n, row) for n, row in enumerate(_open(config), start=1) if row is not None)
    numbered = islice(numbered, config.max_rows or None)
    while batch := list(islice(numbered, BATCH)):
        yield batch


def read_columns(config: "DataConfig") -> tuple["DataConfig", list[str], Iterator[Batch]]:
    """Find the columns of questions, answers and images.

    Returns:
        The settings with these columns ("" for no images), the names of all columns, and the
        batches of `read`.

    Raises:
        ValueError: There are no rows, a column is missing, or several columns could replace a
            missing default.
    """
    batches = read(config)
    if not (first := next(batches, [])):
        raise ValueError(f"{config.source} holds no rows: give a data.source that does")
    names = list(dict.fromkeys(name for _, row in first if isinstance(row, dict) for name in row))
    current, changes = {config.question_column, config.answer_column}, {}
    for setting, likely in LIKELY.items():
        if (column := getattr(config, setting)) in names or not names:
            continue
        fit = [name for name in names if name.strip().lower() in likely and name not in current]
        if setting == "image_column" and (not column or (column == likely[0] and not fit)):
            changes[setting] = ""  # a task without images
            continue
        if column != likely[0] or not fit:
            refuse_unknown(f"column of {config.source} (data.{setting})", column, names)
        if len(fit) > 1:
            raise ValueError(
                f"{config.source} has no column {likely[0]!r}, and {' and '.join(map(repr, fit))} "
                f"could each take its place: name one, as in data.{setting} = {fit[0]!r}"
            )
        changes[setting] = fit[0]
    return config.model_copy(update=changes), names, chain([first], batches)


def is_local(source: str) -> bool:
    """Return whether a source is a file of rows, not a built-in set, a folder or a hub dataset."""
    return source not in BUILT_IN and Path(source).suffix.lower() in READERS


def folder_of(config: "DataConfig") -> Path | None:
    """Return the folder in which a source lies; None for a dataset on the hub."""
    path = _places(config)[0]
    return path if path.is_dir() else path.parent if path.is_file() else None


def _places(config: "DataConfig") -> list[Path]:
    """Return the paths that a source may refer to, existing ones first."""
    name = BUILT_IN.get(config.source, config.source)
    # A notebook's kernel runs in the notebook's folder, so commands look for files there too.
    folders = (Path.cwd(), project_path("notebooks"), project_path(""))
    places = dict.fromkeys(folder / name for folder in folders)
    return sorted(places, key=lambda path: not path.exists())


def _open(config: "DataConfig") -> Iterator[Row | str | None]:
    places = _places(config)
    path = places[0]
    if path.is_dir():
        return _read_hub(str(path), config)
    if reader := READERS.get(path.suffix.lower()):
        if not path.is_file():
            raise FileNotFoundError(
                f"data.source = {config.source!r}: there is no {', nor '.join(map(str, places))}; "
                "name a file that is there"
            )
        return reader(path)
    if path.is_file():
        raise ValueError(f"{path}: unknown file type; its name must end in {', '.join(READERS)}")
    if "/" not in config.source:
        refuse_unknown("data.source", config.source, list(BUILT_IN))
    return _read_hub(config.source, config)


def _open_text(path: Path) -> IO[str]:
    """Open a text file; bad bytes become U+FFFD, which validation reports by row and column."""
    with path.open("rb") as file:
        encoding = "utf-16" if file.read(2) in UTF_16 else "utf-8-sig"
    return path.open(encoding=encoding, errors="replace")


def _read_csv(path: Path) -> Iterator[Row]:
    """Yield the rows of a table, as text; its header shows what separates the cells.

    Raises:
        ValueError: A quotation mark is not closed, a line has more cells than the header, or the
            header names a column twice.
    """
    with _open_text(path) as file:
        first, usual = file.readline(), "\t" if path.suffix.lower() == ".tsv" else ","
        file.seek(0)
        mark = next((mark for mark in (usual, ",", ";", "\t") if mark in first), usual)
        _refuse_repeated(path, list(filter(None, next(csv.reader([first], delimiter=mark), []))))
        table = {"sep": mark, "dtype": str, "index_col": False, "keep_default_na": False}
        try:
            for chunk in pd.read_csv(file, chunksize=BATCH, **table):
                yield from chunk.fillna("").to_dict("records")
        except pd.errors.EmptyDataError:
            return
        except (pd.errors.ParserError, pd.errors.ParserWarning) as error:
            raise ValueError(
                f"{path} cannot be read ({str(error).strip()}): correct that line, its quotation "
                "marks or its separators; or save the rows as JSON lines"
            ) from None


def _read_json(path: Path) -> Iterator[Row | str | None]:
    """Yield the objects of a JSON Lines file (None for a blank line), or of a JSON array."""
    with _open_text(path) as file:
        first = file.read(1000).lstrip()
        file.seek(0)
        if path.suffix.lower() == ".json" and first.startswith("["):
            try:
                return (yield from map(_object, json.load(file)))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path} is not JSON ({error}): correct it, or copy it again"
                ) from None
        for line in map(str.strip, file):
            try:
                yield _object(json.loads(line)) if line else None
            except (ValueError, RecursionError) as error:
                yield f"not JSON ({error}): {line[:80]!r}"


def _object(value: Any) -> Row | str:
    return value if isinstance(value, dict) else f"not an object: {value!r:.80}"


def _refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Refuse a column name that occurs twice: the values of the first column would be lost."""
    if duplicates := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{path} names {duplicates[0]!r} twice: rename or remove one of them")


def _read_parquet(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        for batch in pq.ParquetFile(path).iter_batches(BATCH):
            _refuse_repeated(path, batch.schema.names)
            yield from _shortened(batch.to_pylist(), batch.schema)
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged or incomplete ({why}): copy it again") from None


def _shortened(rows: Iterable[Row], schema: "pa.Schema") -> Iterator[Row]:
    """Yield rows in which 79.1, stored in 32 or 16 bits, is 79.1 and not 79.0999984741211."""
    kinds = {field.name: str(field.type) for field in schema}
    small = {name: SMALL[kind] for name, kind in kinds.items() if kind in SMALL}
    for row in rows:
        cells = {name: row[name] for name in small if row[name] is not None}
        yield row | {name: float(str(small[name](cell))) for name, cell in cells.items()}


def _read_hub(name: str, config: "DataConfig") -> Iterator[Row]:
    import datasets

    place = {"split": config.split, "revision": config.revision or None}
    try:
        rows = datasets.load_dataset(
            name, config.subset or None, streaming=config.streaming, **place
        )
        rows = rows if config.streaming else rows.to_iterable_dataset()
        if rows.features:
            rows = _shortened(rows.decode(False), rows.features.arrow_schema)
        yield from rows
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.source = {name!r} (subset {config.subset!r}, {place}) could not be loaded: "
            f"{error}. Check the names and the network, or use a local copy: "
            "`hf download --repo-type dataset NAME --local-dir FOLDER`, then data.source=FOLDER"
        ) from error


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv}
READERS[".parquet"] = _read_parquet
