"""Write and read prepared rows, in one Parquet file per split.

The columns for the rewards are stored as JSON, so a scalar, list or dict is read as it was written.
Its type may differ between rows, which Arrow's own columns do not allow. Images are stored as PNG
files in a column of their own. Prompts are stored without their images.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from grpo_nb.data.images import decode, encode
from grpo_nb.data.sources import Row
from grpo_nb.files import atomic_path
from grpo_nb.rewards.prompts import as_text, with_images

if TYPE_CHECKING:
    from grpo_nb.runs import Run

AS_THEY_ARE = ("prompt", "question", "answer", "prompt_tokens", "images")  # all others: JSON


def pack(row: Row) -> Row:
    """Return a row as it is stored: its images as PNG files, its prompt as text."""
    images = {"images": list(map(encode, row["images"]))} if "images" in row else {}
    return row | {"prompt": as_text(row["prompt"])} | images


def unpack(row: Row) -> Row:
    """Return the row that `pack` stored, with its images and with them in its prompt."""
    if "images" not in row:
        return row
    images = list(map(decode, row["images"]))
    return row | {"images": images, "prompt": with_images(row["prompt"], images)}


def write_rows(path: Path, rows: Sequence[Row], names: Iterable[str] = ()) -> None:
    """Write packed rows to a Parquet file.

    Args:
        path: The file.
        rows: The rows, as `pack` returns them.
        names: Columns that the file has even if no row has them.
    """
    table = {name: [row[name] for row in rows] for name in AS_THEY_ARE if name in rows[0]}
    for name in dict.fromkeys(chain(names, *rows)):
        if name not in AS_THEY_ARE:
            table[name] = [json.dumps(row.get(name), default=str) for row in rows]
    pq.write_table(pa.table(table), path)


def replace_train(run: "Run", rows: Sequence[Row]) -> None:
    """Replace the rows of data/train.parquet with these rows, in this order."""
    with atomic_path(run / "data/train.parquet") as temporary:
        write_rows(temporary, list(map(pack, rows)))


def read_rows(path: Path, max_rows: int = 0) -> list[Row]:
    """Return the first `max_rows` rows (0: all) of a Parquet file, with its JSON columns parsed.

    Images are decoded. Each takes three bytes of memory per pixel.
    """
    table = pq.read_table(path)
    rows = table.slice(0, max_rows or None).to_pylist()
    names = [name for name in table.column_names if name not in AS_THEY_ARE]
    return [unpack(row | {name: json.loads(row[name]) for name in names}) for row in rows]


def load(run: "Run", split: str, max_rows: int = 0) -> list[Row]:
    """Return the first `max_rows` rows (0: all) of "train", "sft" or "eval" from stage 01."""
    return read_rows(run / f"data/{split}.parquet", max_rows)
