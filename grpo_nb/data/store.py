"""Prepared rows on disk, a Parquet file a split.

Columns for the rewards are JSON there: a scalar, list or dict comes back as it was, also where
rows differ in type, which Arrow's own columns refuse.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data.sources import BATCH, Row
from grpo_nb.runs import Run, atomic_path

_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_COLUMNS = {"prompt": pa.list_(_TURN), "question": pa.string(), "answer": pa.string()}
_COLUMNS |= {"prompt_tokens": pa.int32()}


def write_rows(path: Path, texts: Sequence[str], names: Iterable[str]) -> None:
    """Parquet of rows that are JSON objects: the known columns, and the others of `names`."""
    passed = [name for name in names if name not in _COLUMNS]
    schema = pa.schema([*_COLUMNS.items(), *((name, pa.json_()) for name in passed)])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(texts), BATCH):
            rows = list(map(json.loads, texts[start : start + BATCH]))
            columns = [[row[name] for row in rows] for name in _COLUMNS]
            columns += [[json.dumps(row.get(name)) for row in rows] for name in passed]
            arrays = list(map(pa.array, columns, schema.types))
            writer.write_table(pa.table(arrays, schema=schema))


def replace_train(run: Run, rows: Sequence[Row]) -> None:
    """Put these rows, in this order, in the place of the rows to train on."""
    with atomic_path(run / "data/train.parquet") as temporary:
        write_rows(temporary, list(map(json.dumps, rows)), rows[0])


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
