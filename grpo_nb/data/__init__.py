"""Rows for training: read from any source, validated, measured, and split without leakage.

    report = data.prepare(run, config.data, config.seed, count_tokens)
    rows = data.load(run, "train")

A million rows pass through in batches: their texts lie on disk, and memory holds a few hashes
and a length of each.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from grpo_nb.config import DataConfig
from grpo_nb.data import duplicates, priming, sources, store
from grpo_nb.data.report import SHOWN_ROWS, Drops, token_figures
from grpo_nb.data.store import load
from grpo_nb.data.validate import GOLD, Checked, check_columns, check_rows, drop_long
from grpo_nb.prompts import SYSTEM_PROMPT, Message
from grpo_nb.runs import Run, write_json

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load", "prepare"]
REPEATED, CONTRADICTORY = "question repeated", "question with several golds"
LEAKS = "nearly a held-out question"
CountTokens = Callable[[Sequence[list[Message]]], list[int]]
Progress = Callable[[int, int, str], None]


class _Pool:
    """The rows that can be used: on disk, and here what is compared across all of them."""

    def __init__(self, path: Path) -> None:
        self.file = store.RowFile(path)
        self.rows_read = 0
        self.labels: Counter[str] = Counter()
        self.tokens: list[np.ndarray] = []  # of prompts too long, too
        self._parts: list[tuple[np.ndarray, ...]] = []

    def add(self, checked: Sequence[Checked]) -> None:
        self.file.add([one.row for one in checked])
        keys = [duplicates.question_key(one.row["prompt"]) for one in checked]
        self._parts.append(
            (
                np.array([one.number for one in checked], dtype=np.int64),
                duplicates.hashes(keys),
                duplicates.hashes([one.gold for one in checked]),
                duplicates.hashes([duplicates.numbers_in(key) for key in keys]),
                duplicates.signatures(keys),
            )
        )

    def columns(self) -> list[np.ndarray]:
        """Number of each row in the source, hashes of question, gold and numbers, MinHashes."""
        return [np.concatenate(parts) for parts in zip(*self._parts, strict=True)]


def prepare(
    run: Run,
    config: DataConfig,
    seed: int,
    count_tokens: CountTokens,
    *,
    preset_prompt: str = SYSTEM_PROMPT,
    reference: priming.Reference | None = None,
    frame: "pd.DataFrame | None" = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Read, validate, drop what cannot be used, split; write the run's data/, all or nothing.

    Args:
        run: Gets data/train.parquet, data/eval.parquet, data/report.json, data/priming.parquet.
        config: Source, columns and limits.
        seed: Of the split.
        count_tokens: Tokens of each prompt as the model's chat template renders it.
        preset_prompt: The system prompt where `data.system_prompt` is "preset".
        reference: Writes the completion of a priming row; a RewardSet has one.
        frame: Rows, instead of `data.source`.
        progress: Told of the rows read so far.

    Returns:
        The report.

    Raises:
        ValueError: Too many faulty rows, or too few that are left.
        OSError: The disk is full.
    """
    check_columns(config)
    if config.priming_rows and reference is None:
        raise ValueError("data.priming_rows needs the reference of a reward set: pass reference=")
    drops = Drops()
    with store.whole_or_nothing(run / "data") as folder:
        pool = _Pool(folder / "rows.arrow")
        batches = sources.read(config, frame)
        prompt = preset_prompt if config.system_prompt == "preset" else config.system_prompt
        _fill(pool, drops, batches, config, prompt, count_tokens, progress or _no_progress)
        if not pool.rows_read:
            raise ValueError(f"{config.source} holds no rows: give a data.source that does")
        drops.refuse_many(pool.rows_read, config)
        train, held_out, near = _split(pool, drops, config, seed)
        pool.file.write(folder / "train.parquet", train)
        pool.file.write(folder / "eval.parquet", held_out)
        pool.file.path.unlink()
        if config.priming_rows:
            rows = store.read_rows(folder / "train.parquet", config.priming_rows)
            priming.save(folder / "priming.parquet", priming.priming_rows(rows, reference))
        report = _report(pool, drops, config) | near
        report |= {"train_rows": len(train), "eval_rows": len(held_out)}
        write_json(folder / "report.json", report)
    return report


def _no_progress(done: int, total: int, note: str) -> None: ...


def _fill(
    pool: _Pool,
    drops: Drops,
    batches: Iterable[sources.Batch],
    config: DataConfig,
    system_prompt: str,
    count_tokens: CountTokens,
    progress: Progress,
) -> None:
    """Check every row of the source; lay down the good ones and note the others."""
    with tqdm(unit=" rows", delay=2) as bar:
        for batch in batches:
            checked, faults = check_rows(batch, config, system_prompt)
            tokens = count_tokens([one.row["prompt"] for one in checked])
            fit, long = drop_long(checked, tokens, config.max_prompt_tokens)
            drops.add_faults([*faults, *long])
            pool.add(fit)
            if config.answer_kind == "choice":
                pool.labels.update(one.gold for one in fit)
            pool.tokens.append(np.array(tokens, dtype=np.int64))
            pool.rows_read += len(batch)
            bar.update(len(batch))
            progress(pool.rows_read, config.max_rows or pool.rows_read, "rows read")


def _split(
    pool: _Pool, drops: Drops, config: DataConfig, seed: int
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Places of the rows to train on and to hold out, and what is nearly the same.

    Raises:
        ValueError: Fewer rows are left than are to be held out, and one to train on.
    """
    numbers, keys, golds, figures, signatures = pool.columns()
    contradictory, repeated = duplicates.exact_duplicates(keys, golds)
    drops.add(CONTRADICTORY, numbers[contradictory])
    drops.add(REPEATED, numbers[repeated])
    places = np.flatnonzero(~contradictory & ~repeated)
    group = duplicates.near_groups(signatures[places], figures[places])
    if len(places) <= config.eval_rows:
        raise ValueError(
            f"{len(places)} rows of {config.source} are left and data.eval_rows = "
            f"{config.eval_rows}: hold out fewer, or give more data. Of {pool.rows_read} rows "
            f"were dropped: {drops.summary()}"
        )
    order = list(range(len(places)))
    random.Random(seed).shuffle(order)
    held_out, train = np.split(np.array(order), [config.eval_rows])
    leaks = np.isin(group[train], group[held_out])
    drops.add(LEAKS, np.sort(numbers[places[train[leaks]]]))
    near = np.flatnonzero(group != np.arange(len(group)))
    pairs = numbers[places[np.stack([near, group[near]], axis=1)]][:SHOWN_ROWS].tolist()
    report = {"near_duplicates": {"rows": len(near), "first": pairs}}
    return places[train[~leaks]].tolist(), places[held_out].tolist(), report


def _report(pool: _Pool, drops: Drops, config: DataConfig) -> dict[str, Any]:
    tokens = np.concatenate(pool.tokens)
    unparsed = drops.reasons.get(GOLD, {"count": 0})["count"]
    return {
        "source": config.source,
        "rows_read": pool.rows_read,
        "dropped": list(drops.reasons.values()),
        "gold_parse_rate": len(tokens) / (len(tokens) + unparsed),
        "prompt_tokens": token_figures(tokens),
        "labels": dict(sorted(pool.labels.items())),
    }
