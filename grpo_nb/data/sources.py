"""Where rows come from: `read` over every kind of source, in batches.

A row: {"question": "What is 47 + 38?", "answer": "85"}, with whatever columns the source has.
A line that is no row is a text that says why, so that it is reported and the others are kept.
"""

import csv
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.config import DataConfig
from grpo_nb.profiles import TASKS, refuse_unknown
from grpo_nb.runs import project_path

if TYPE_CHECKING:
    import pandas as pd

BATCH = 5_000  # rows
BUILT_IN = {task: f"data/tasks/{task}.jsonl" for task in TASKS if task != "math"}
BUILT_IN["arithmetic"] = "data/arithmetic.jsonl"
Row = dict[str, Any]
Batch = list[tuple[int, Row | str]]


def read(config: DataConfig, frame: "pd.DataFrame | None" = None) -> Iterator[Batch]:
    """Batches of numbered rows (from 1; for JSON lines the number of the line).

    The source is a frame, or what `data.source` names: a built-in set, a local file (READERS),
    a folder, or a hub dataset. One that cannot be read is an error that says what to do.
    """
    rows = _open(config) if frame is None else _read_frame(frame)
    numbered = ((number, row) for number, row in enumerate(rows, start=1) if row is not None)
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


def _open_text(path: Path):
    """Bytes that are not UTF-8 become U+FFFD, which validation reports by row and column."""
    with path.open("rb") as file:
        if file.read(2) in (b"\xff\xfe", b"\xfe\xff"):
            raise ValueError(f"{path} is UTF-16: save it as UTF-8")
    return path.open(encoding="utf-8-sig", errors="replace", newline="")


def _read_csv(path: Path) -> Iterator[Row | str]:
    with _open_text(path) as file:
        lines = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            for row in lines:
                yield f"more cells than the header has: {row[None]}" if None in row else row
        except csv.Error as error:
            place = f"{path}, line {lines.line_num}"
            raise ValueError(f"{place}: {error}: is a quotation mark not closed?") from None


def _read_json(path: Path) -> Iterator[Row | str | None]:
    """JSON lines (blank ones are None), or one array of objects."""
    with _open_text(path) as file:
        first = file.readline()
        file.seek(0)
        if path.suffix.lower() == ".json" and first.lstrip().startswith("["):
            try:
                return (yield from map(_object, json.load(file)))
            except ValueError as error:
                raise ValueError(f"{path} is not JSON ({error}): copy it again") from None
        for line in map(str.strip, file):
            try:
                yield _object(json.loads(line)) if line else None
            except (ValueError, RecursionError) as error:
                yield f"not JSON ({error}): {line[:80]!r}"


def _object(value: Any) -> Row | str:
    return value if isinstance(value, dict) else f"not an object: {value!r:.80}"


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
            yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} is damaged or not whole ({why}): copy it again") from None


def _read_frame(frame: "pd.DataFrame") -> Iterator[Row]:
    for start in range(0, len(frame), BATCH):
        part = frame.iloc[start : start + BATCH].astype(object)
        for row in part.where(part.notna(), None).to_dict("records"):
            # Lists that pandas read from Parquet are arrays of numpy.
            yield {k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()}


def _read_hub(name: str, config: DataConfig) -> Iterator[Row]:
    import datasets

    place = {"split": config.split, "revision": config.revision or None}
    try:
        loaded = datasets.load_dataset(
            name, config.subset or None, streaming=config.streaming, **place
        )
        for columns in loaded.iter(batch_size=BATCH):
            values = zip(*columns.values(), strict=True)
            yield from (dict(zip(columns, row, strict=True)) for row in values)
    except (ValueError, OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"data.source = {name!r} (subset {config.subset!r}, {place}) could not be loaded: "
            f"{error}. Check the names and the network, or use a local copy: "
            "`hf download --repo-type dataset NAME --local-dir FOLDER`, then data.source=FOLDER"
        ) from error


READERS = {".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv}
READERS |= {".parquet": _read_arrow, ".arrow": _read_arrow}
