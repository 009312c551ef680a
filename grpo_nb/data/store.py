"""Prepared rows on disk: set down batch by batch, then written split by split as Parquet.

Columns for the rewards are kept as JSON, whatever they hold: a scalar, list or dict comes back
as it was, also where rows differ in type, which Arrow's own columns refuse.
"""

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data.sources import BATCH, Row
from grpo_nb.runs import Run, atomic_path

_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_COLUMNS = {
    "prompt": pa.list_(_TURN),
    "question": pa.string(),
    "answer": pa.string(),
    "prompt_tokens": pa.int32(),
}
_LAID_DOWN = pa.schema([*_COLUMNS.items(), ("passed", pa.string())])


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when all is written.

    Raises:
        OSError: The disk is full; nothing is left behind, an earlier folder is as it was.
    """
    try:
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            yield temporary
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise OSError(
            error.errno,
            f"no room to write {folder} ({error}). Nothing was changed. Free some space, set "
            "GRPO_NB_RUNS to a folder on a larger disk, or read fewer rows with data.max_rows",
        ) from None


class RowFile:
    """Rows laid down in the order of the source, then taken from it by number."""

    def __init__(self, path: Path) -> None:
        self.path, self.passed_names = path, {}  # a dict keeps the order
        self._writer = pa.ipc.new_file(path, _LAID_DOWN)

    def add(self, rows: Sequence[Row]) -> None:
        passed = [{k: v for k, v in row.items() if k not in _COLUMNS} for row in rows]
        self.passed_names.update(dict.fromkeys(name for one in passed for name in one))
        arrays = [pa.array([row[name] for row in rows], kind) for name, kind in _COLUMNS.items()]
        texts = pa.array([json.dumps(one, default=str) for one in passed], pa.string())
        self._writer.write_batch(pa.record_batch([*arrays, texts], schema=_LAID_DOWN))

    def write(self, path: Path, places: Sequence[int]) -> None:
        """Parquet of the rows at these places, in this order; the columns passed on apart."""
        self._writer.close()
        table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        schema = pa.schema([*_COLUMNS.items(), *((name, pa.json_()) for name in self.passed_names)])
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(0, len(places), BATCH):
                part = table.take(pa.array(places[start : start + BATCH])).combine_chunks()
                passed = [json.loads(text.as_py()) for text in part["passed"]]
                columns = [part[name] for name in _COLUMNS]
                columns += [_json_array(passed, name) for name in self.passed_names]
                writer.write_table(pa.table(columns, schema=schema))


def _json_array(rows: Sequence[Row], name: str) -> pa.Array:
    return pa.array([json.dumps(row.get(name)) for row in rows], pa.json_())


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """The first rows (0: all) of a Parquet file, JSON columns as what they hold."""
    file = pq.ParquetFile(path)
    rows: list[Row] = []
    for batch in file.iter_batches(BATCH):
        rows += batch.to_pylist()
        if 0 < max_rows <= len(rows):
            break
    rows = rows[: max_rows or None]
    passed = [field.name for field in file.schema_arrow if field.type == pa.json_()]
    for row in rows:
        row.update({name: json.loads(row[name]) for name in passed})
    return rows


def load(run: Run, split: str, max_rows: int = 0) -> list[Row]:
    """The first rows (0: all) of "train" or "eval" as stage 01 wrote them."""
    return read_rows(run / f"data/{split}.parquet", max_rows)
