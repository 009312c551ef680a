"""Write and read prepared rows, in one Parquet file per split.

The columns for the rewards are stored as JSON. So a scalar, list or dict is read as it was written,
even if its type differs between rows, which Arrow's own columns do not allow.
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
    """Write rows to a Parquet file.

    Args:
        path: The file.
        texts: The rows, as JSON objects.
        names: The columns; those that are not in `_COLUMNS` are stored as JSON.
    """
    others = [name for name in names if name not in _COLUMNS]
    schema = pa.schema([*_COLUMNS.items(), *((name, pa.json_()) for name in others)])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(texts), BATCH):
            rows = list(map(json.loads, texts[start : start + BATCH]))
            columns = [[row[name] for row in rows] for name in _COLUMNS]
            columns += [[json.dumps(row.get(name)) for row in rows] for name in others]
            arrays = list(map(pa.array, columns, schema.types))
            writer.write_table(pa.table(arrays, schema=schema))


def replace_train(run: Run, rows: Sequence[Row]) -> None:
    """Write data/train.parquet anew with these rows, in this order."""
    with atomic_path(run / "data/train.parquet") as temporary:
        write_rows(temporary, list(map(json.dumps, rows)), rows[0])


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """Return the first rows (0: all) of a Parquet file, with its JSON columns parsed."""
    file = pq.ParquetFile(path)
    rows: list[Row] = []
    for batch in file.iter_batches(BATCH):
        rows += batch.to_pylist()
        if 0 < max_rows <= len(rows):
            break
    names = [field.name for field in file.schema_arrow if field.type == pa.json_()]
    for row in rows:
        row.update({name: json.loads(row[name]) for name in names})
    return rows[: max_rows or None]


def load(run: Run, split: str, max_rows: int = 0) -> list[Row]:
    """Return the first rows (0: all) of "train", "sft" or "eval", as stage 01 wrote them."""
    return read_rows(run / f"data/{split}.parquet", max_rows)
