"""Where rows come from: `read` over every kind of source, in batches.

A row: {"question": "What is 47 + 38?", "answer": "85"}, with whatever columns the source has.
A line that is no row is a text that says why, so that it is reported and the others are kept.
"""

import csv
import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from grpo_nb.runs import project_path, refuse_unknown
from grpo_nb.runs.config import DataConfig
from grpo_nb.runs.profiles import TASKS

BATCH = 5_000  # rows
NO_TEXT = (b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b", b"PK\x03\x04")
csv.field_size_limit(2**24)  # characters of a cell; 128 KiB unless told
BUILT_IN = {task: f"data/tasks/{task}.jsonl" for task in TASKS if task != "math"}
BUILT_IN["arithmetic"] = "data/arithmetic.jsonl"
Row = dict[str, Any]
Batch = list[tuple[int, Row | str]]


def read(config: DataConfig) -> Iterator[Batch]:
    """Batches of numbered rows (from 1; for JSON lines the number of the line).

    The source is what `data.source` names: a built-in set, a local file (READERS), a folder, or
    a hub dataset. One that cannot be read is an error that says what to do.
    """
    numbered = ((n, row) for n, row in enumerate(_open(config), start=1) if row is not None)
    numbered = islice(numbered, config.max_rows or None)
    while batch := list(islice(numbered, BATCH)):
        yield batch


def _open(config: DataConfig) -> Iterator[Row | str | None]:
    path = project_path(BUILT_IN.get(config.source, config.source))
    if path.is_dir():
        return _read_hub(str(path), config)
    if reader := READERS.get(path.suffix.lower()):
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist: set data.source to a file that does")
        return reader(path)
    if path.is_file():
        raise ValueError(f"{path}: the name of a data file ends in {', '.join(READERS)}")
    if "/" not in config.source:
        refuse_unknown("data.source", config.source, list(BUILT_IN))
    return _read_hub(config.source, config)


def _open_text(path: Path) -> IO[str]:
    """Bytes that are not UTF-8 become U+FFFD, which validation reports by row and column."""
    with path.open("rb") as file:
        if file.read(4).startswith(NO_TEXT):
            raise ValueError(
                f"{path} is in UTF-16, compressed, or a spreadsheet: unpack it, save it as UTF-8"
            )
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _read_csv(path: Path) -> Iterator[Row | str]:
    """Cells between commas, semicolons or tabs, whichever the header has."""
    with _open_text(path) as file:
        first, usual = file.readline(), "\t" if path.suffix.lower() == ".tsv" else ","
        file.seek(0)
        delimiter = next((mark for mark in (usual, ",", ";", "\t") if mark in first), usual)
        reader, begun = csv.reader(file, delimiter=delimiter, strict=True), 1
        try:
            header = next(reader, [])
            _refuse_repeated(str(path), [name for name in header if name])
            begun = reader.line_num + 1
            for cells in filter(None, reader):
                if len(cells) == len(header):
                    yield dict(zip(header, cells, strict=True))
                else:
                    found = "more" if len(cells) > len(header) else "fewer"
                    yield f"{found} cells than the header has: {cells!r:.80}"
                begun = reader.line_num + 1
        except csv.Error as error:
            raise ValueError(
                f"{path}: the row that begins in line {begun}: {error}: is a quotation mark not "
                "closed, or not doubled inside its cell?"
            ) from None


def _read_json(path: Path) -> Iterator[Row | str | None]:
    """JSON lines (blank ones are None), or one array of objects."""
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


def _refuse_repeated(where: str, names: Sequence[str]) -> None:
    """Raise ValueError for a name that stands twice, whose first values would be lost."""
    if len(set(names)) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{where} names {name!r} twice: rename or remove one of them")


def _read_arrow(path: Path) -> Iterator[Row]:
    """Parquet, or Arrow's own formats: the file, and the stream that `datasets` writes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix.lower() == ".parquet":
            batches = pq.ParquetFile(path).iter_batches(BATCH)
        elif path.open("rb").read(6) == b"ARROW1":
            reader = pa.ipc.open_file(path)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = pa.ipc.open_stream(path.open("rb"))
        for batch in batches:
            _refuse_repeated(str(path), batch.schema.names)
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged or not whole ({why}): copy it again") from None


def _read_hub(name: str, config: DataConfig) -> Iterator[Row]:
    import datasets

    place = {"split": config.split, "revision": config.revision or None}
    try:
        loaded = datasets.load_dataset(
            name, config.subset or None, streaming=config.streaming, **place
        )
        yield from loaded
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.source = {name!r} (subset {config.subset!r}, {place}) could not be loaded: "
            f"{error}. Check the names and the network, or use a local copy: "
            "`hf download --repo-type dataset NAME --local-dir FOLDER`, then data.source=FOLDER"
        ) from error


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv}
READERS |= {".parquet": _read_arrow, ".arrow": _read_arrow}
