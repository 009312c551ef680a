"""Rows for training: read from any source, validated, measured, and split without leakage.

    report = data.prepare(run, config.data, config.seed, count_tokens)
    rows = data.load(run, "train")

A million rows pass in batches: their texts lie on disk, memory holds a few hashes of each.
"""

import random
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from grpo_nb.data import duplicates, sources, store
from grpo_nb.data.priming import Reference, priming_rows
from grpo_nb.data.report import SHOWN_ROWS, Drops, figures
from grpo_nb.data.store import load, replace_train
from grpo_nb.data.validate import CountTokens, check_rows, extra_columns
from grpo_nb.rewards.prompts import SYSTEM_PROMPT
from grpo_nb.runs import Run, atomic_path, write_json
from grpo_nb.runs.config import DataConfig

__all__ = ["load", "prepare", "replace_train"]
REPEATED, CONTRADICTORY = "question repeated", "question with several golds"
LEAKS = "nearly a held-out question"


def prepare(
    run: Run,
    config: DataConfig,
    seed: int,
    count_tokens: CountTokens,
    *,
    preset_prompt: str = SYSTEM_PROMPT,
    reference: Reference | None = None,
    frame: pd.DataFrame | None = None,
) -> dict[str, Any]:
    """Read, validate, drop what cannot be used, split; the report. Writes data/, all or nothing.

    Args:
        run: Gets data/train.parquet, data/eval.parquet, data/report.json, data/priming.parquet.
        config: Source, columns and limits.
        seed: Of the split.
        count_tokens: Tokens of each prompt as the model's chat template renders it.
        preset_prompt: The system prompt where `data.system_prompt` is "preset".
        reference: Writes the completion of a priming row; a RewardSet has one.
        frame: Rows, instead of `data.source`.
    """
    extra_columns(config)
    if config.priming_rows and reference is None:
        raise ValueError("data.priming_rows needs the reference of a reward set: pass reference=")
    if config.system_prompt == "preset":
        config = config.model_copy(update={"system_prompt": preset_prompt})
    drops = Drops()
    with atomic_path(run / "data") as folder:
        folder.mkdir()
        rows = store.RowFile(folder / "rows.json")
        seen, minhashes, tokens = _fill(rows, drops, config, count_tokens, frame)
        train, held_out, near = _split(seen, minhashes, drops, config, seed)
        del seen, minhashes  # 160 bytes a row
        rows.write(folder / "train.parquet", train)
        rows.write(folder / "eval.parquet", held_out)
        rows.path.unlink()
        report = {"source": config.source, "rows_read": drops.rows_read}
        report |= {"train_rows": len(train), "eval_rows": len(held_out)}
        report |= {"dropped": list(drops.reasons.values()), "near_duplicates": near}
        report |= figures(tokens, drops)
        if config.answer_kind == "choice":
            letters = pq.read_table(folder / "train.parquet", columns=["answer"])["answer"]
            report["labels"] = letters.to_pandas().value_counts().sort_index().to_dict()
        if config.priming_rows:
            primed = store.read_rows(folder / "train.parquet", config.priming_rows)
            table = pa.Table.from_pylist(priming_rows(primed, reference))
            pq.write_table(table, folder / "priming.parquet")
        write_json(folder / "report.json", report)
    return report


def _fill(
    rows: store.RowFile,
    drops: Drops,
    config: DataConfig,
    count_tokens: CountTokens,
    frame: pd.DataFrame | None,
) -> tuple[pd.DataFrame, np.ndarray, np.ndarray]:
    """Lay down the good rows and note the others; fingerprints, and tokens of all prompts."""
    hashes, minhashes, tokens = [], [], []
    with tqdm(unit=" rows", delay=2) as bar:
        for batch in sources.read(config, frame):
            checked, faults, lengths = check_rows(batch, config, count_tokens)
            rows.add([one.row for one in checked])
            drops.add_faults(faults, len(batch))
            part, signatures = duplicates.fingerprints(checked)
            hashes.append(part)
            minhashes.append(signatures)
            tokens.append(np.array(lengths, dtype=np.int64))
            bar.update(len(batch))
    drops.refuse_many(config)
    return pd.concat(hashes, ignore_index=True), np.concatenate(minhashes), np.concatenate(tokens)


def _split(
    seen: pd.DataFrame, minhashes: np.ndarray, drops: Drops, config: DataConfig, seed: int
) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Places of the rows to train on and to hold out, and which rows are nearly the same."""
    disputed = seen.groupby("question")["gold"].transform("nunique") > 1
    repeated = seen.duplicated("question") & ~disputed
    drops.add(CONTRADICTORY, seen["row"][disputed])
    drops.add(REPEATED, seen["row"][repeated])
    kept = seen[~disputed & ~repeated]
    if len(kept) <= config.eval_rows:
        raise ValueError(
            f"{len(kept)} rows of {config.source} are left and data.eval_rows = "
            f"{config.eval_rows}: hold out fewer, or give more data. Of {drops.rows_read} rows "
            f"were dropped: {drops}"
        )
    places = kept.index.to_numpy()
    group = duplicates.near_groups(kept["numbers"].to_numpy(), minhashes[places])
    order = list(range(len(kept)))
    random.Random(seed).shuffle(order)
    held_out, train = np.split(np.array(order), [config.eval_rows])
    leaks = np.isin(group[train], group[held_out])
    rows = kept["row"].to_numpy()
    drops.add(LEAKS, np.sort(rows[train[leaks]]))
    near = np.flatnonzero(group != np.arange(len(group)))
    pairs = np.stack([rows[near], rows[group[near]]], axis=1)[:SHOWN_ROWS].tolist()
    return places[train[~leaks]], places[held_out], {"rows": len(near), "first": pairs}
