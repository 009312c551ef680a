"""Prepared rows on disk: laid down batch by batch, then written split by split as Parquet.

Columns for the rewards are kept as JSON: a scalar, list or dict comes back as it was, also
where rows differ in type, which Arrow's own columns refuse.
"""

import errno
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from grpo_nb.data.sources import BATCH, Row
from grpo_nb.runs import Run, atomic_path

_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_PROMPT, _QUESTION = ("prompt", pa.list_(_TURN)), ("question", pa.string())
_REST = [("answer", pa.string()), ("prompt_tokens", pa.int32())]
_COLUMNS = pa.schema([_PROMPT, _QUESTION, *_REST])
_LAID_DOWN = pa.schema([_PROMPT, *_REST, ("passed on", pa.string())])


@contextmanager
def whole_or_nothing(folder: Path) -> Iterator[Path]:
    """An empty folder that takes the place of `folder` when all is written, and not before."""
    try:
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            yield temporary
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
            raise
        raise OSError(
            f"no room to write {folder} ({error}), which is left as it was: free some space, "
            "point GRPO_NB_RUNS at a larger disk, or read fewer rows with data.max_rows"
        ) from None


class RowFile:
    """Rows laid down in the order of the source, then taken out by their places."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, None] = {}  # of the columns passed on, in order
        self._writer = pa.ipc.new_file(path, _LAID_DOWN)

    def add(self, rows: Sequence[Row]) -> None:
        passed = [{k: v for k, v in row.items() if k not in _COLUMNS.names} for row in rows]
        self._names.update(dict.fromkeys(name for one in passed for name in one))
        columns = [[row[name] for row in rows] for name in _LAID_DOWN.names[:-1]]
        columns.append([json.dumps(one, default=str) for one in passed])
        arrays = map(pa.array, columns, _LAID_DOWN.types)
        self._writer.write_batch(pa.record_batch(list(arrays), schema=_LAID_DOWN))

    def write(self, path: Path, places: Sequence[int]) -> None:
        """Parquet of the rows at these places, in this order."""
        self._writer.close()
        table = pa.ipc.open_file(pa.memory_map(str(self.path))).read_all()
        schema = pa.schema([*_COLUMNS, *((name, pa.json_()) for name in self._names)])
        with pq.ParquetWriter(path, schema) as writer:
            for start in range(0, len(places), BATCH):
                part = table.take(places[start : start + BATCH])
                prompt, answer, tokens, passed = (c.combine_chunks() for c in part.columns)
                last = pc.subtract(prompt.offsets[1:], 1)
                question = prompt.values.field("content").take(last)
                dicts = [json.loads(text) for text in passed.to_pylist()]
                texts = [[json.dumps(one.get(name)) for one in dicts] for name in self._names]
                extra = [pa.array(text, pa.json_()) for text in texts]
                columns = [prompt, question, answer, tokens, *extra]
                writer.write_table(pa.table(columns, schema=schema))


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
