"""Prepare rows: read, validate, drop repeated and leaked rows, and split.

    rows = grpo_nb.prepare("openai/gsm8k", tokenizer, subset="main")
    GRPOTrainer(…, train_dataset=rows.train_dataset, eval_dataset=rows.eval_dataset)

Images stay in memory as PNG files.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from grpo_nb.answers import TAGS, Form, find_form
from grpo_nb.checks import Check, Checks
from grpo_nb.data import gym, sources
from grpo_nb.data.rows import LONG, PLAIN, CountTokens, pack, prepare_row, prompt_tokens, write_rows
from grpo_nb.data.sources import REMEDIES, Fault, Options, Row
from grpo_nb.data.split import LEAKS, fingerprint, split_rows
from grpo_nb.files import atomic_path, write_json
from grpo_nb.models import template, tokenizer_of
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards import PRESETS, RewardSet
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from datasets import Dataset

    from grpo_nb.runs import Run
    from grpo_nb.runs.settings import DataConfig

SHOWN_ROWS = 20  # row numbers listed per reason
TABLE = ["number", "packed", "question", "answer", "sequences", "images"]
Drop = tuple[str, int, str]  # reason, number of the row, example


@dataclass(repr=False)
class Prepared:
    """Hold prepared rows and the report on them; show its checks in a notebook and a terminal.

    rows: The rows of the splits "train", "sft" and "eval", with images as PNG files.
    report: Rows read, rows left out by reason, columns and prompt lengths.
    checks: What the function `checks` finds in the report.
    """

    rows: dict[str, list[Row]]
    report: dict[str, Any]
    checks: Checks

    @property
    def train_dataset(self) -> "Dataset":
        """Return the rows to train on, as TRL's trainers take them."""
        return as_dataset(self.rows["train"])

    @property
    def eval_dataset(self) -> "Dataset":
        """Return the held-out rows, as TRL's trainers take them."""
        return as_dataset(self.rows["eval"])

    def save(self, folder: Path) -> dict[str, Any]:
        """Write a Parquet file per split and report.json, all or none; return the report."""
        names = dict.fromkeys(name for split in self.rows.values() for row in split for name in row)
        with atomic_path(folder) as temporary:
            temporary.mkdir()
            for split in [split for split in self.rows if self.rows[split]]:
                write_rows(temporary / f"{split}.parquet", self.rows[split], names)
            write_json(temporary / "report.json", self.report)
        return self.report

    def __repr__(self) -> str:
        return str(self.checks)

    def _ipython_display_(self) -> None:
        self.checks._ipython_display_()


def prepare(
    source: Any = "arithmetic",
    processing_class: Any = None,
    *,
    subset: str = "",
    split: str = "train",
    revision: str = "",
    streaming: bool = False,
    question_column: str = "question",
    answer_column: str = "answer",
    image_column: str = "images",
    image_pixels: int = 262_144,
    extra_columns: str | Sequence[str] = "",
    answer_format: str = "auto",
    answer_kind: str = "number",
    system_prompt: str = "preset",
    max_rows: int = 0,
    options: Mapping[str, Any] = MappingProxyType({}),
    levels: int = 0,
    shots: int = 0,
    max_dropped_share: float = 0.05,
    eval_rows: int = 256,
    eval_share: float = 0.2,
    max_prompt_tokens: int = 256,
    environment: str = "",
    sft_rows: int = 0,
    form: Form | str = TAGS,
    seed: int = 0,
    count_tokens: CountTokens | None = None,
) -> Prepared:
    r"""Read, validate and split rows: questions with reference answers, for GRPO.

    Args:
        source: A built-in set, a file, a folder, a dataset on the hub, tasks of reasoning-gym, or
            the rows themselves: a `datasets.Dataset`, a table of pandas, a list.
        processing_class: The model's tokenizer or processor, whose chat template renders the
            prompts; with None, the length of prompts is not measured.
        subset, split, revision, streaming: The part of a dataset on the hub, and how it is read.
        question_column: The column of questions (texts or chats).
        answer_column: The column of reference answers.
        image_column: The column of images, if there are any; "" for none.
        image_pixels: Larger images are scaled down to this many pixels.
        extra_columns: Further columns for the rewards: "a, b", a list of names, or "all".
        answer_format: Where an answer stands in its cell: auto, as_is, ####, boxed, tag, regex:….
        answer_kind: number, math, choice, json, code or text.
        system_prompt: The text that asks for the format; "preset" for that of `form`.
        max_rows: The number of rows to read; 0 reads all, or generates 1,000.
        options: Sizes of the tasks of reasoning-gym, by their own names.
        levels: How many levels of each task's curriculum are mixed; `options` override their sizes.
        shots: The number of worked examples before each question. The rows that serve as examples
            are in no split.
        max_dropped_share: The largest allowed share of faulty rows.
        eval_rows, eval_share: The largest number and share of rows that are held out.
        max_prompt_tokens: Longer prompts are dropped.
        environment: If it is set, extra columns count as part of the question.
        sft_rows: Rows for an SFT warm-up, taken from the training rows.
        form: The form in which completions are written, or its name.
        seed: The seed of the split.
        count_tokens: Counts the tokens of prompts in place of `processing_class`.

    Returns:
        The rows, whose `train_dataset` and `eval_dataset` TRL takes, with a report. In messages,
        `data.NAME` means the argument NAME.

    Raises:
        ValueError: An argument is wrong, the source cannot be read, too many rows are faulty, or
            too few are left.
        FileNotFoundError: The source does not exist.
    """
    config = SimpleNamespace(**locals(), rows=None)
    if not isinstance(source, str | Path):
        config.rows, source = source, f"a {type(source).__name__}"
    config.source = source = str(source)
    if not isinstance(extra_columns, str):
        config.extra_columns = ", ".join(extra_columns)
    form = find_form(form) if isinstance(form, str) else form
    form = PRESETS["gym"].form if gym.is_gym(source) and form == TAGS else form
    refuse_unknown("data.answer_kind", answer_kind, list(PLAIN))
    config.form = form
    if system_prompt == "preset":
        config.system_prompt = form.system_prompt
    if gym.is_gym(source):
        vars(config).update(gym.SETTINGS)
    elif levels:
        raise ValueError(f"data.levels = {levels}: {source} has no curriculum; set 0")
    if processing_class is not None:
        tokenizer = tokenizer_of(processing_class)
        config.count_tokens = count_tokens or partial(template.count_tokens, tokenizer)
    table, drops, tokens, columns = _read(config)
    total = len(table) + len(drops)
    sizes = {"eval_rows": eval_rows, "eval_share": eval_share, "sft_rows": sft_rows, "seed": seed}
    places, left_out = split_rows(table, **sizes)
    drops += [(reason, table["number"][row], "") for reason in left_out for row in left_out[reason]]
    splits = {name: table["packed"].iloc[rows].tolist() for name, rows in places.items()}
    if not splits["train"]:
        raise ValueError(
            f"usable rows left of {source}: {len(splits['eval'])}, and training and evaluation "
            f"need at least one each: give more data. Rows dropped:{_as_text(drops)}"
        )
    p50, p95, p99 = (int(np.percentile(tokens, p, method="higher")) for p in (50, 95, 99))
    lengths = {"p50": p50, "p95": p95, "p99": p99, "max": max(tokens)}
    lengths["recommended_cap"] = -(-p99 // 8) * 8
    report = {"source": source, "rows_read": total, "columns": columns}
    report |= {f"{name}_rows": len(splits[name]) for name in splits}
    report |= {"dropped": _dropped(drops), "prompt_tokens": lengths}
    if gym.is_gym(source):
        report["generated"] = gym.figures(splits, config)
    return Prepared(splits, report, checks(report, config))


def prepare_run(
    run: "Run",
    config: "DataConfig",
    seed: int,
    count_tokens: CountTokens,
    preset: RewardSet = PRESETS["math"],
) -> dict[str, Any]:
    """Prepare the rows of a run, write its folder data/, and return the report.

    Args:
        run: The run, which gets data/train.parquet, data/eval.parquet, data/report.json, and
            data/sft.parquet if `data.sft_rows` is set.
        config: The arguments of `prepare`.
        seed: The seed of the split.
        count_tokens: Counts the tokens of each prompt as the model's chat template renders it.
        preset: The reward set. Its form may give the system prompt.

    Raises:
        ValueError, FileNotFoundError: From `prepare`.
    """
    arguments = vars(config) | {"form": preset.form, "seed": seed}
    return prepare(**arguments, count_tokens=count_tokens).save(run / "data")


def worked_rows(rows: Sequence[Row], preset: RewardSet) -> list[Row]:
    """Return rows for TRL's SFTTrainer: {"prompt": [system, user], "completion": [assistant], …}.

    The completion is the row's worked solution if it has one, else what the rewards' own function
    `reference` writes, else the answer without any reasoning. From one stock line of
    reasoning, the policy would learn to write it for every question, and would be paid for it.
    """
    own, pairs = preset.own_reference, []
    for row in rows:
        # Without the marks of GSM8K's calculator.
        steps = re.sub(r"<<[^<>]*>>", "", row.get("worked") or "").strip()
        is_own = own and not steps
        text = own(row) if is_own else preset.form.write(steps or None, str(row["answer"]))
        completion = [{"role": "assistant", "content": text}]
        pairs.append({**row, "completion": completion})
    return pairs


def _dropped(drops: Sequence[Drop]) -> list[dict[str, Any]]:
    """Return an entry of the report for each reason: count, first rows, an example."""
    table = pd.DataFrame(drops, columns=["reason", "rows", "example"])
    groups = table.groupby("reason", sort=False)
    rows = groups["rows"].agg(lambda numbers: list(numbers[:SHOWN_ROWS]))
    entries = {"count": groups.size(), "rows": rows, "example": groups["example"].first()}
    return pd.DataFrame(entries).reset_index().to_dict("records")


def _as_text(drops: Sequence[Drop]) -> str:
    lines = map(_line, _dropped(drops))
    return "".join(f"\n  {c.name}: {c.evidence}. {c.fix}" for c in lines) or " none"


def _read(config: Options) -> tuple[pd.DataFrame, list[Drop], list[int], dict[str, Any]]:
    """Read and validate rows.

    Returns:
        A table of the usable rows (number, packed, and their fingerprints); the rows left out; the
        number of tokens of every measured prompt; and the names of the columns.

    Raises:
        ValueError: The source cannot be read, or too many of its rows are faulty.
    """
    names, numbered = sources.read_columns(config)
    lines, drops, tokens, turns = [], [], [], defaultdict(list)
    for number, raw in tqdm(numbered, unit=" rows", unit_scale=True, delay=2):
        try:
            row, plain = prepare_row(raw, config)
            line = fingerprint(row, plain, columns=bool(config.environment))
            if gym.is_gym(config.source):  # its questions differ, though they are alike
                line["sequences"] = line["sequences"][:0]
            if config.shots and _is_shot(row, turns, config):
                continue
            tokens.append(prompt_tokens(row["prompt"], config, config.count_tokens))
            if tokens[-1] > config.max_prompt_tokens:
                limit = f"over data.max_prompt_tokens = {config.max_prompt_tokens}"
                raise Fault(LONG, "prompt", f"{tokens[-1]} tokens, {limit}")
        except Fault as fault:
            drops.append((fault.reason, number, str(fault)))
            continue
        packed = pack(row | {"prompt_tokens": tokens[-1]})
        lines.append({"number": number, "packed": packed, **line})
    faulty = sum(reason != LONG for reason, *_ in drops)
    if faulty > config.max_dropped_share * (total := len(lines) + len(drops)):
        raise ValueError(
            f"{faulty} of {total} rows of {config.source} cannot be used, more than "
            f"data.max_dropped_share = {config.max_dropped_share:g} of them:{_as_text(drops)}"
        )
    columns = {"question": config.question_column, "answer": config.answer_column}
    columns |= {"image": config.image_column} if config.image_column else {}
    columns["others"] = [name for name in names if name not in columns.values()]
    return pd.DataFrame(lines, columns=TABLE), drops, tokens, columns


def _is_shot(row: Row, turns: dict[str, list[Message]], config: Options) -> bool:
    """Return whether a row is one of the first, the few-shot examples; else add them to its prompt.

    Raises:
        ValueError: The row has images, which cannot be combined with examples.
    """
    if row.get("images"):
        raise ValueError(f"data.shots = {config.shots}: rows with images cannot be shown; set 0")
    examples = turns[json.loads(row["entry"])["task"] if gym.is_gym(config.source) else ""]
    if is_shot := len(examples) < 2 * config.shots:
        answer = config.form.write(row.get("worked"), row["answer"])
        examples += [row["prompt"][-1], {"role": "assistant", "content": answer}]
    row["prompt"][-1:-1] = examples
    return is_shot


def as_dataset(packed: Sequence[Row]) -> "Dataset":
    """Return packed rows as TRL's trainers take them.

    Images are a column of their own; TRL puts them into the prompts.

    Raises:
        ValueError: Some rows have an image and others have none.
    """
    from datasets import Dataset, Image

    plain = [{name: row[name] for name in row if name != "images"} for row in packed]
    files = [[{"bytes": file, "path": None} for file in row.get("images", ())] for row in packed]
    try:  # rows may hold values of any type, which Arrow would merge or refuse
        dataset = Dataset.from_list(plain, on_mixed_types="use_json")
    except TypeError:  # an earlier version of datasets
        dataset = Dataset.from_list(plain)
    if not any(files):
        return dataset
    if missing := files.count([]):
        raise ValueError(
            f"{missing} of {len(files)} prompts have no image, and TRL fails at a micro-batch "
            "without one: train only on rows that have images, or give every row one"
        )
    return dataset.add_column("images", files).cast_column("images", [Image()])


def checks(report: Mapping[str, Any], config: Options) -> Checks:
    """Return the checks of stage 01 from its report; each reason for dropping rows has a check."""
    columns, lengths, cap = report["columns"], report["prompt_tokens"], config.max_prompt_tokens
    names = f"questions in {columns['question']!r}, reference answers in {columns['answer']!r}"
    names += f", images in {columns['image']!r}" if "image" in columns else ""
    names += f"; others: {', '.join(columns['others']) or 'none'} (data.extra_columns)"
    rows = f"{report['rows_read']} rows read: {report['train_rows']} to train on, "
    rows += f"{report['sft_rows']} for the SFT warm-up, " if report["sft_rows"] else ""
    rows += f"{report['eval_rows']} held out"
    leaks = sum(entry["count"] for entry in report["dropped"] if entry["reason"] == LEAKS)
    split = f"no held-out prompt is trained on; {leaks} rows nearly equal to one were left out"
    length = f"half have at most {lengths['p50']} tokens, 99 % {lengths['p99']}"
    length += f", the longest {lengths['max']}; cap {cap}"
    state, fix = "ok", ""
    if not lengths["max"]:
        state, length, fix = "note", "not measured", "give prepare the model's tokenizer"
    elif lengths["p99"] > cap:
        state, fix = "warning", f"set data.max_prompt_tokens = {lengths['recommended_cap']}"
    lines = [
        Check("columns", "ok", names),
        Check("dataset", "ok", rows),
        Check("no leakage", "ok", split),
        Check("prompt length", state, length, fix),
    ]
    if about := report.get("generated"):
        lines.append(gym.check(about))
    return Checks([*lines, *map(_line, report["dropped"])])


def _line(entry: Mapping[str, Any]) -> Check:
    fix, rows = REMEDIES.get(entry["reason"], ""), ", ".join(map(str, entry["rows"]))
    evidence = f"{entry['count']} left out, the first: {rows}. {entry['example']}".rstrip(". ")
    return Check(entry["reason"], "warning" if fix else "ok", evidence, fix)
