"""Rows for training: read from any source, validated, measured, and split without leakage.

    report = data.prepare(run, config.data, config.seed, count_tokens)
    rows = data.load(run, "train")

A million rows pass in batches: their texts lie on disk, memory holds a few hashes of each.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from grpo_nb.data import duplicates, sources, store
from grpo_nb.data.report import LEAKS, REPEATED, Drops, checks, figures
from grpo_nb.data.store import Row, load, replace_train
from grpo_nb.data.validate import CONTRADICTORY, CountTokens, check_rows, extra_columns
from grpo_nb.rewards import TAGS
from grpo_nb.runs import Run, atomic_path, write_json
from grpo_nb.runs.config import DataConfig

__all__ = ["CONTRADICTORY", "LEAKS", "REPEATED", "checks", "load", "prepare", "replace_train"]
Reference = Callable[[Mapping[str, Any]], str]


def prepare(
    run: Run,
    config: DataConfig,
    seed: int,
    count_tokens: CountTokens,
    *,
    preset_prompt: str = TAGS.system_prompt,
    reference: Reference | None = None,
) -> dict[str, Any]:
    """Read, validate, drop what cannot be used, split; the report. Writes data/, all or nothing.

    Args:
        run: Gets data/train.parquet, data/eval.parquet, data/report.json, data/sft.parquet.
        config: Source, columns and limits.
        seed: Of the split.
        count_tokens: Tokens of each prompt as the model's chat template renders it.
        preset_prompt: The system prompt where `data.system_prompt` is "preset".
        reference: Writes the completion of a row of the warm-up; a RewardSet has one.

    Raises:
        ValueError: A setting is wrong, the source cannot be read, too many rows are faulty, or
            too few are left.
        FileNotFoundError: The source does not exist.
    """
    extra_columns(config)
    if config.sft_rows and reference is None:
        raise ValueError("data.sft_rows needs the reference of a reward set: pass reference=")
    if config.system_prompt == "preset":
        config = config.model_copy(update={"system_prompt": preset_prompt})
    drops = Drops()
    with atomic_path(run / "data") as folder:
        folder.mkdir()
        rows = store.RowFile(folder / "rows.json")
        seen, minhashes, tokens = _fill(rows, drops, config, count_tokens)
        train, held_out = _split(seen, minhashes, drops, config, seed)
        del seen, minhashes  # 160 bytes a row
        rows.write(folder / "train.parquet", train)
        rows.write(folder / "eval.parquet", held_out)
        rows.path.unlink()
        if config.sft_rows:
            shown = store.read_rows(folder / "train.parquet", config.sft_rows)
            table = pa.Table.from_pylist(_warm_up(shown, reference))
            pq.write_table(table, folder / "sft.parquet")
        report = {"source": config.source, "rows_read": drops.rows_read}
        report |= {"train_rows": len(train), "eval_rows": len(held_out)}
        report |= {"dropped": list(drops.reasons.values()), **figures(tokens, drops)}
        write_json(folder / "report.json", report)
    return report


def _warm_up(rows: Sequence[Row], reference: Reference) -> list[Row]:
    """Rows for TRL's SFTTrainer: each prompt with its worked answer, else what `reference` writes.

    {"prompt": [system, user], "completion": [assistant]}
    """
    made = []
    for row in rows:
        text = reference(row)
        if worked := row.get("worked"):
            worked = re.sub(r"<<[^<>]*>>", "", worked).strip()  # GSM8K's calculator marks
            text = TAGS.write(worked, row["answer"])
        completion = [{"role": "assistant", "content": text}]
        made.append({"prompt": row["prompt"], "completion": completion})
    return made


def _fill(
    rows: store.RowFile, drops: Drops, config: DataConfig, count_tokens: CountTokens
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Lay down the good rows and note the others; fingerprints, and tokens of all prompts."""
    hashes, minhashes, tokens = [], [], []
    with tqdm(unit=" rows", delay=2) as bar:
        for batch in sources.read(config):
            checked, faults, lengths = check_rows(batch, config, count_tokens)
            rows.add([one.row for one in checked])
            drops.rows_read += len(batch)
            for fault in faults:
                drops.add(fault.reason, [fault.row], fault.seen)
            part, signatures = duplicates.fingerprints(checked)
            hashes.append(part)
            minhashes.append(signatures)
            tokens.append(np.array(lengths, dtype=np.int64))
            bar.update(len(batch))
    drops.refuse_many(config)
    return pd.concat(hashes, ignore_index=True), np.concatenate(minhashes), np.concatenate(tokens)


def _split(
    seen: pd.DataFrame, minhashes: np.ndarray, drops: Drops, config: DataConfig, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places of the rows to train on and to hold out."""
    disputed = seen.groupby("question")["answer"].transform("nunique") > 1
    repeated = seen.duplicated("question") & ~disputed
    drops.add(CONTRADICTORY, seen["row"][disputed])
    drops.add(REPEATED, seen["row"][repeated])
    kept = seen[~disputed & ~repeated]
    if len(kept) <= config.eval_rows:
        raise ValueError(
            f"{len(kept)} rows of {config.source} are left and data.eval_rows = "
            f"{config.eval_rows}: hold out fewer, or give more data. Of {drops.rows_read} rows "
            f"were dropped:{drops}"
        )
    places = kept.index.to_numpy()
    order = list(range(len(kept)))
    random.Random(seed).shuffle(order)
    held_out, train = np.split(np.array(order), [config.eval_rows])
    leaks = duplicates.near(kept["numbers"].to_numpy(), minhashes[places], held_out)
    drops.add(LEAKS, kept["row"].to_numpy()[leaks])
    return places[train[~leaks[train]]], places[held_out]
