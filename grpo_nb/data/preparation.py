"""Prepare the rows of a run: read, validate, drop repeated and leaked rows, and split.

A million rows can be prepared. They are read in batches, and only the JSON of each row, a few
hashes and its images as PNG files stay in memory.
"""

import json
import random
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from grpo_nb.data import duplicates, sources
from grpo_nb.data.references import printable
from grpo_nb.data.report import LEAKS, REPEATED, Drops, figures
from grpo_nb.data.sources import Batch
from grpo_nb.data.store import Row, pack, write_rows
from grpo_nb.data.validate import CONTRADICTORY, CountTokens, extra_columns, validate_rows
from grpo_nb.files import atomic_path, write_json
from grpo_nb.rewards import PRESETS, RewardSet

if TYPE_CHECKING:
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import DataConfig


def prepare(
    run: "Run",
    config: "DataConfig",
    seed: int,
    count_tokens: CountTokens,
    preset: RewardSet = PRESETS["math"],
) -> dict[str, Any]:
    """Read, validate and split the rows; write the run's data folder, whole or not at all.

    Args:
        run: The run, which gets data/train.parquet, data/eval.parquet, data/report.json, and
            data/sft.parquet if `data.sft_rows` is set.
        config: The source, its columns, and limits.
        seed: The seed of the split.
        count_tokens: Counts the tokens of each prompt as the model's chat template renders it.
        preset: The reward set. Its form may give the system prompt.

    Returns:
        The report: rows read, rows dropped by reason, columns, answer kinds and prompt lengths.

    Raises:
        ValueError: A setting is wrong, the source cannot be read, too many rows are faulty, or
            too few are left.
        FileNotFoundError: The source does not exist.
    """
    extra_columns(config)
    drops = Drops()
    with atomic_path(run / "data") as folder:
        folder.mkdir()
        config, names, batches = sources.read_columns(with_system_prompt(config, preset))
        prints, tokens = _read(drops, batches, config, count_tokens)
        report = {"source": config.source, "rows_read": len(prints) + drops.count()}
        kinds = prints["kind"].value_counts().to_dict()
        report |= {"columns": _columns(names, config), "answer_kinds": kinds}
        drops.refuse_many(report["rows_read"], config)
        train, held_out = _split(prints, drops, config, seed)
        # Warm-up rows are kept out of "train": they would make baseline and validation look better.
        rest = len(train) - min(config.sft_rows, len(train) // 2)
        train, warm_up = train[:rest], train[rest:]
        packed = prints["packed"].to_numpy()
        names = dict.fromkeys(name for row in packed for name in json.loads(row.text))
        for split, places in (("train", train), ("sft", warm_up), ("eval", held_out)):
            if len(places):
                write_rows(folder / f"{split}.parquet", packed[places], names)
        report |= {"train_rows": len(train), "sft_rows": len(warm_up), "eval_rows": len(held_out)}
        report |= {"dropped": list(drops.values())}
        report |= figures(tokens, drops)
        write_json(folder / "report.json", report)
    return report


def with_system_prompt(config: "DataConfig", preset: RewardSet) -> "DataConfig":
    """Return the settings with the form's system prompt in place of "preset"."""
    if config.system_prompt != "preset":
        return config
    return config.model_copy(update={"system_prompt": preset.form.system_prompt})


def worked_rows(rows: Sequence[Row], preset: RewardSet) -> list[Row]:
    """Return rows for TRL's SFTTrainer: {"prompt": [system, user], "completion": [assistant], …}.

    The completion is the row's worked solution if it has one, otherwise its reference answer.
    """
    pairs = []
    for row in rows:
        text = preset.reference(row)
        if solution := row.get("worked"):
            solution = re.sub(r"<<[^<>]*>>", "", solution).strip()  # GSM8K's calculator marks
            text = preset.form.write(solution, row["answer"])
        completion = [{"role": "assistant", "content": text}]
        pairs.append({**row, "completion": completion})
    return pairs


def _columns(names: Sequence[str], config: "DataConfig") -> dict[str, Any]:
    """Return the names of the question, answer and image columns, and of all other columns."""
    columns = {"question": config.question_column, "answer": config.answer_column}
    columns |= {"image": config.image_column} if config.image_column in names else {}
    others = [printable(name) for name in names if name and name not in columns.values()]
    return columns | {"others": others}


def _read(
    drops: Drops, batches: Iterable[Batch], config: "DataConfig", count_tokens: CountTokens
) -> tuple[pd.DataFrame, list[int]]:
    """Return a table of the usable rows, and the number of tokens of every measured prompt.

    The table holds each row's fingerprints, and the columns "packed" (the row) and "kind".
    """
    packed, kinds, tokens, tables = [], [], [], [duplicates.fingerprints([])]
    for batch in tqdm(batches, unit=" rows", unit_scale=sources.BATCH, delay=2):
        rows, faults, lengths = validate_rows(batch, config, count_tokens)
        for fault in faults:
            drops.add(fault.reason, [fault.row], fault.evidence)
        for _, row, plain in rows:
            packed.append(pack(row))
            kinds.append(plain[0] if config.answer_kind == "math" else config.answer_kind)
        tables.append(duplicates.fingerprints(rows, columns=bool(config.environment)))
        tokens += lengths
    table = pd.concat(tables, ignore_index=True)
    return table.assign(packed=pd.Series(packed, dtype=object), kind=kinds), tokens


def _split(
    prints: pd.DataFrame, drops: Drops, config: "DataConfig", seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the rows to train on, and of the rows to hold out."""
    conflicts = prints.groupby("question")["answer"].transform("nunique") > 1
    repeats = prints.duplicated("question") & ~conflicts
    drops.add(CONTRADICTORY, prints["row"][conflicts])
    drops.add(REPEATED, prints["row"][repeats])
    rest = prints[~conflicts & ~repeats]
    order = list(range(len(rest)))
    random.Random(seed).shuffle(order)
    # Rows with the same first image are put side by side, so that the split separates few of them.
    images = rest["images"].to_numpy()
    first_images = [images[place][0] if images[place] else f"row {place}" for place in order]
    ranks = pd.factorize(np.array(first_images, dtype=object))[0]
    order = np.array(order, dtype=int)[ranks.argsort(kind="stable")]
    held_out, train = np.split(order, [config.held_out(len(rest))])
    leaks = duplicates.near(rest, held_out)
    drops.add(LEAKS, rest["row"].to_numpy()[leaks])
    train = train[~leaks[train]]
    if not len(train):
        raise ValueError(
            f"usable rows left of {config.source}: {len(held_out)}, and training and evaluation "
            f"need at least one each: give more data. Rows dropped:{drops}"
        )
    places = rest.index.to_numpy()
    return places[train], places[held_out]
