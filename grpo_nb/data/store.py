"""Prepared rows on disk: laid down batch by batch, then written split by split as Parquet.

Columns for the rewards are JSON there: a scalar, list or dict comes back as it was, also where
rows differ in type, which Arrow's own columns refuse.
"""

import json
import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data.sources import BATCH, Row
from grpo_nb.runs import Run, atomic_path

_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_COLUMNS = {"prompt": pa.list_(_TURN), "question": pa.string(), "answer": pa.string()}
_COLUMNS |= {"prompt_tokens": pa.int32()}


class RowFile:
    """Rows laid down as JSON in the order of the source, then taken out by their places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("w+b")
        self._ends = array("q", [0])
        self._passed: dict[str, None] = {}  # names of the other columns, in order

    def add(self, rows: Sequence[Row]) -> None:
        for row in rows:
            size = self._file.write(json.dumps(row, default=str).encode())
            self._ends.append(self._ends[-1] + size)
            self._passed.update(dict.fromkeys(row))

    def write(self, path: Path, places: Sequence[int]) -> None:
        """Parquet of the rows at these places, in this order."""
        self._file.flush()
        starts = range(0, len(places), BATCH)
        batches = ([self._row(place) for place in places[at : at + BATCH]] for at in starts)
        _write_batches(path, batches, list(self._passed))

    def _row(self, place: int) -> Row:
        start, end = self._ends[place], self._ends[place + 1]
        return json.loads(os.pread(self._file.fileno(), end - start, start))


def _write_batches(path: Path, batches: Iterable[list[Row]], names: Sequence[str]) -> None:
    """Parquet of the columns of prepared rows and, as JSON, of the others in `names`."""
    passed = [name for name in names if name not in _COLUMNS]
    schema = pa.schema([*_COLUMNS.items(), *((name, pa.json_()) for name in passed)])
    with pq.ParquetWriter(path, schema) as writer:
        for rows in batches:
            columns = [[row[name] for row in rows] for name in _COLUMNS]
            columns += [[json.dumps(row.get(name)) for row in rows] for name in passed]
            arrays = list(map(pa.array, columns, schema.types))
            writer.write_table(pa.table(arrays, schema=schema))


def replace_train(run: Run, rows: Sequence[Row]) -> None:
    """Put these rows, in this order, in the place of the rows to train on."""
    with atomic_path(run / "data/train.parquet") as temporary:
        _write_batches(temporary, [list(rows)], list(rows[0]))


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """The first rows (0: all) of a Parquet file, JSON columns as what they hold."""
    file = pq.ParquetFile(path)
    rows: list[Row] = []
    for batch in file.iter_batches(BATCH):
        rows += batch.to_pylist()
        if 0 < max_rows <= len(rows):
            break
    passed = [field.name for field in file.schema_arrow if field.type == pa.json_()]
    for row in rows:
        row.update({name: json.loads(row[name]) for name in passed})
    return rows[: max_rows or None]


def load(run: Run, split: str, max_rows: int = 0) -> list[Row]:
    """The first rows (0: all) of "train" or "eval" as stage 01 wrote them."""
    return read_rows(run / f"data/{split}.parquet", max_rows)
