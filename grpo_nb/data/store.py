"""Write and read prepared rows, in one Parquet file per split.

The columns for the rewards are stored as JSON, so a scalar, list or dict is read as it was written.
Its type may differ between rows, which Arrow's own columns do not allow. Images are stored as PNG
files in a column of their own. Prompts are stored without their images.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data.images import decode, encode
from grpo_nb.data.sources import BATCH, Row
from grpo_nb.files import atomic_path
from grpo_nb.rewards.prompts import as_text, with_images

if TYPE_CHECKING:
    from grpo_nb.runs import Run

_TURN = pa.struct([("role", pa.string()), ("content", pa.string())])
_COLUMNS = {"prompt": pa.list_(_TURN), "question": pa.string(), "answer": pa.string()}
_COLUMNS |= {"prompt_tokens": pa.int32()}


class Packed(NamedTuple):
    """Hold a row compactly: its images as PNG files, and the rest as JSON."""

    text: str
    images: list[bytes]


def pack(row: Row) -> Packed:
    """Return the packed form of a row."""
    bare = {name: cell for name, cell in row.items() if name != "images"}
    text = json.dumps(bare | {"prompt": as_text(row["prompt"])}, default=str)
    return Packed(text, list(map(encode, row.get("images", ()))))


def write_rows(path: Path, packed: Sequence[Packed], names: Iterable[str]) -> None:
    """Write rows to a Parquet file; columns that are not in `_COLUMNS` are stored as JSON."""
    arrow = _COLUMNS | ({"images": pa.list_(pa.binary())} if packed[0].images else {})
    others = [name for name in names if name not in arrow]
    schema = pa.schema([*arrow.items(), *((name, pa.json_()) for name in others)])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, len(packed), BATCH):
            part = packed[start : start + BATCH]
            rows = [json.loads(each.text) | {"images": each.images} for each in part]
            columns = [[row[name] for row in rows] for name in arrow]
            columns += [[json.dumps(row.get(name)) for row in rows] for name in others]
            arrays = list(map(pa.array, columns, schema.types))
            writer.write_table(pa.table(arrays, schema=schema))


def replace_train(run: "Run", rows: Sequence[Row]) -> None:
    """Replace the rows of data/train.parquet with these rows, in this order."""
    with atomic_path(run / "data/train.parquet") as temporary:
        write_rows(temporary, list(map(pack, rows)), rows[0])


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """Return the first `max_rows` rows (0: all) of a Parquet file, with its JSON columns parsed.

    Images are decoded. Each takes three bytes of memory per pixel.
    """
    file = pq.ParquetFile(path)
    names = [field.name for field in file.schema_arrow if field.type == pa.json_()]
    batches = (batch.to_pylist() for batch in file.iter_batches(BATCH))
    rows = list(islice(chain.from_iterable(batches), max_rows or None))
    for row in rows:
        row.update({name: json.loads(row[name]) for name in names})
        if "images" in row:
            row["images"] = list(map(decode, row["images"]))
            row["prompt"] = with_images(row["prompt"], row["images"])
    return rows


def load(run: "Run", split: str, max_rows: int = 0) -> list[Row]:
    """Return the first `max_rows` rows (0: all) of "train", "sft" or "eval" from stage 01."""
    return read_rows(run / f"data/{split}.parquet", max_rows)
