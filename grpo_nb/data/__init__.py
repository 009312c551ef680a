"""Rows for training: read from any source, validated, measured, and split without leakage.

    report = data.prepare(run, config.data, config.seed, count_tokens)
    rows = data.load(run, "train")

A million rows pass in batches; memory holds each as JSON, with a few hashes.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from grpo_nb.data import duplicates, sources, validate
from grpo_nb.data.proposal import problem, proposal
from grpo_nb.data.report import LEAKS, REPEATED, Drops, checks, figures
from grpo_nb.data.sources import Batch
from grpo_nb.data.store import Row, load, replace_train, write_rows
from grpo_nb.data.validate import CONTRADICTORY, CountTokens, check_rows, extra_columns
from grpo_nb.rewards import PRESETS, RewardSet
from grpo_nb.runs import Run, atomic_path, write_json
from grpo_nb.runs.config import DataConfig

__all__ = ["CONTRADICTORY", "LEAKS", "REPEATED", "checks", "load", "prepare", "problem", "proposal"]
__all__ += ["replace_train"]


def prepare(
    run: Run,
    config: DataConfig,
    seed: int,
    count_tokens: CountTokens,
    preset: RewardSet = PRESETS["math"],
) -> dict[str, Any]:
    """Read, validate, drop what cannot be used, split; the report. Writes data/, all or nothing.

    Args:
        run: Gets data/train.parquet, data/eval.parquet, data/report.json, data/sft.parquet.
        config: Source, columns and limits.
        seed: Of the split.
        count_tokens: Tokens of each prompt as the model's chat template renders it.
        preset: Its form is the system prompt where `data.system_prompt` is "preset"; completions
            of the warm-up are written in it.

    Raises:
        ValueError: A setting is wrong, the source cannot be read, too many rows are faulty, or
            too few are left.
        FileNotFoundError: The source does not exist.
    """
    extra_columns(config)
    if config.system_prompt == "preset":
        config = config.model_copy(update={"system_prompt": preset.form.system_prompt})
    drops, doubts = Drops(), Drops()
    with atomic_path(run / "data") as folder:
        folder.mkdir()
        config, names, batches = sources.read_columns(config)
        texts, seen, tokens, kinds = _read(drops, doubts, batches, config, count_tokens)
        report = {"source": config.source, "rows_read": len(texts) + drops.count()}
        report |= {"columns": _columns(names, config), "answer_kinds": dict(kinds.most_common())}
        drops.refuse_many(report["rows_read"], config)
        train, held_out = _split(seen, drops, doubts, config, seed)
        # Of their own: what the warm-up has shown would make baseline and validation look better.
        rest = len(train) - min(config.sft_rows, len(train) // 2)
        train, warm_up = train[:rest], train[rest:]
        names = dict.fromkeys(name for text in texts for name in json.loads(text))
        for split, places in (("train", train), ("eval", held_out)):
            write_rows(folder / f"{split}.parquet", [texts[place] for place in places], names)
        if len(warm_up):
            rows = [json.loads(texts[place]) for place in warm_up]
            pq.write_table(pa.Table.from_pylist(worked_rows(rows, preset)), folder / "sft.parquet")
        report |= {"train_rows": len(train), "sft_rows": len(warm_up), "eval_rows": len(held_out)}
        report |= {"dropped": list(drops.values()), "doubts": list(doubts.values())}
        report |= figures(tokens, drops)
        write_json(folder / "report.json", report)
    return report


def worked_rows(rows: Sequence[Row], preset: RewardSet) -> list[Row]:
    """Return rows for TRL's SFTTrainer: each prompt with its worked or its reference answer.

    {"prompt": [system, user], "completion": [assistant]}
    """
    made = []
    for row in rows:
        text = preset.reference(row)
        if worked := row.get("worked"):
            worked = re.sub(r"<<[^<>]*>>", "", worked).strip()  # GSM8K's calculator marks
            text = preset.form.write(worked, row["answer"])
        completion = [{"role": "assistant", "content": text}]
        made.append({"prompt": row["prompt"], "completion": completion})
    return made


def _columns(names: Sequence[str], config: DataConfig) -> dict[str, Any]:
    """Which columns hold questions and reference answers, and what others there are."""
    taken = {"question": config.question_column, "answer": config.answer_column}
    others = [name for name in names if name and name not in taken.values()]
    # A report is UTF-8, which has no halves of surrogate pairs.
    return taken | {"others": [name.encode(errors="backslashreplace").decode() for name in others]}


def _read(
    drops: Drops,
    doubts: Drops,
    batches: Iterable[Batch],
    config: DataConfig,
    count_tokens: CountTokens,
) -> tuple[list[str], pd.DataFrame, list[int], Counter[str]]:
    """The good rows as JSON, their fingerprints, the tokens of all prompts, kinds of answers."""
    texts, prints, tokens, kinds = [], [duplicates.fingerprints([])], [], Counter()
    for batch in tqdm(batches, unit=" rows", unit_scale=sources.BATCH, delay=2):
        checked, faults, lengths = check_rows(batch, config, count_tokens)
        texts += [json.dumps(one.row, default=str) for one in checked]
        for fault in faults:
            drops.add(fault.reason, [fault.row], fault.seen)
        for number, row, _ in checked:
            if validate.NO_ANSWER.fullmatch(row["answer"]):
                example = f"row {number}: the reference answer is {row['answer']!r}"
                doubts.add(validate.PLACEHOLDER, [number], example)
        prints.append(duplicates.fingerprints(checked, columns=bool(config.environment)))
        tokens += lengths
        kind = config.answer_kind
        kinds.update(one.plain[0] if kind == "math" else kind for one in checked)
    return texts, pd.concat(prints, ignore_index=True), tokens, kinds


def _split(
    seen: pd.DataFrame, drops: Drops, doubts: Drops, config: DataConfig, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Places of the rows to train on and to hold out."""
    disputed = seen.groupby("question")["answer"].transform("nunique") > 1
    repeated = seen.duplicated("question") & ~disputed
    drops.add(CONTRADICTORY, seen["row"][disputed])
    drops.add(REPEATED, seen["row"][repeated])
    kept = seen[~disputed & ~repeated]
    alike = kept.groupby(["frame", "order"])["answer"].transform("nunique") > 1
    doubts.add(validate.PUNCTUATION, kept["row"].to_numpy()[alike])
    if len(kept) < 2:
        raise ValueError(
            f"{len(kept)} rows of {config.source} are left, and one to train on and one to hold "
            f"out are the least: give more data. Dropped were:{drops}"
        )
    places = kept.index.to_numpy()
    order = list(range(len(kept)))
    random.Random(seed).shuffle(order)
    held_out, train = np.split(np.array(order), [config.held_out(len(kept))])
    leaks = duplicates.near(kept, held_out)
    drops.add(LEAKS, kept["row"].to_numpy()[leaks])
    return places[train[~leaks[train]]], places[held_out]
