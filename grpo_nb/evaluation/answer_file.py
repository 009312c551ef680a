"""Answer a file of questions with a run's model, as JSON lines: `python -m grpo_nb answer`."""

import json
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from grpo_nb import data, environments
from grpo_nb.data import sources
from grpo_nb.data.validate import LONG, MISSING, Fault, prompt_tokens, row_to_ask
from grpo_nb.evaluation.comparison import score_rows
from grpo_nb.export import refuse_incomplete, trained_paths
from grpo_nb.models import Engine, open_engine
from grpo_nb.models.hub import load_tokenizer
from grpo_nb.models.template import count_tokens
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.rewards import RewardSet, load_rewards
from grpo_nb.runs import Run, atomic_path, refuse_unknown
from grpo_nb.runs.config import DataConfig, RunConfig
from grpo_nb.runs.files import read_json

MODELS = ("merged", "adapter", "base")
Line = dict[str, Any]
NumberedRow = tuple[int, sources.Row]  # a row with its number in the source


def answer_file(
    run: Run,
    source: Path,
    target: Path,
    *,
    model: str = "merged",
    question_column: str = "",
    answer_column: str = "",
    engine: str = "detect",
) -> str:
    """Answer every row of a file greedily, and write the target at the end, atomically.

    A line of the target has row (the number in the source), question, completion, answer (as
    extracted), tokens and truncated. If the row has a reference answer, the line also has
    reference, each reward, and reward (their weighted total). A row that cannot be asked has only a
    `fault`; an unusable reference answer is a `fault` beside the completion.

    Args:
        run: A trained run.
        source: A file of questions: CSV, TSV, JSON, JSON lines or Parquet.
        target: The file of JSON lines to write.
        model: "merged", or "adapter" or "base" with the weights used in training.
        question_column: The column of questions; by default that of the run's data.
        answer_column: The column of reference answers, if any; by default that of the run's data.
        engine: The engine, as `open_engine` takes it.

    Returns:
        A sentence for the user: number of rows and faults, mean scores.

    Raises:
        FileNotFoundError: The source, or the model in the run, does not exist.
        ValueError: No row can be asked, the target exists, or the merged model is out of date.
    """
    if target.exists():
        raise ValueError(f"{target} exists: choose another target, or remove it")
    config, weights = run.config(), weights_of(run, model)
    preset = load_rewards(config.rewards)
    settings = _settings(run, source, preset, question_column, answer_column)
    tokenizer = load_tokenizer(weights["model_path"], weights["chat_template_kwargs"])
    bench = bench_of(config, preset, tokenizer)
    rows, lines = _read(settings, answer_column, config, bench), []
    size = config.evaluate.eval_batch_size
    with closing(open_engine(**weights, engine=engine)) as model_engine:
        for start in tqdm(range(0, len(rows), size), unit=" batches"):
            lines += _answer(rows[start : start + size], model_engine, bench)
    # A fault may quote half a surrogate pair, which becomes a JSON escape.
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n", errors="backslashreplace")
    return _summary(target, lines, bench.preset.names)


def _settings(
    run: Run, source: Path, preset: RewardSet, question_column: str, answer_column: str
) -> DataConfig:
    """Return the run's data settings, changed to read this file."""
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file: give a table of questions")
    columns = read_json(run / "data/report.json")["columns"]
    changes = {"source": str(source.resolve()), "max_rows": 0, "sft_rows": 0}
    changes["question_column"] = question_column or columns["question"]
    changes["answer_column"] = answer_column or columns["answer"]
    changes["image_column"] = columns.get("image", "")
    return data.with_system_prompt(run.config().data, preset).model_copy(update=changes)


def weights_of(run: Run, model: str) -> dict[str, Any]:
    """Return the arguments with which `open_engine` loads a run's model.

    Args:
        run: A trained run.
        model: "merged", "adapter" or "base".

    Raises:
        ValueError: The merged model is out of date.
        FileNotFoundError: There is no complete merged model, or no adapter.
    """
    refuse_unknown("model", model, list(MODELS))
    config = run.config()
    template = {"chat_template_kwargs": config.model.chat_template_kwargs}
    if model == "merged":
        run.refuse_outdated()
        folder = str(refuse_incomplete(run / "model/merged").resolve())
        return {"model_path": folder, "adapter": None, "quantization": "16bit", **template}
    base, path, adapter = trained_paths(run, config)
    if model == "base":
        path, adapter = base, None
    quantization = config.model.quantization
    return {"model_path": path, "adapter": adapter, "quantization": quantization, **template}


def _read(
    settings: DataConfig, answer_column: str, config: RunConfig, bench: Bench
) -> list[NumberedRow]:
    """Read the rows and build their prompts; a row without a prompt has a fault."""
    tools = environments.tools_of(config, bench.tokenizer)
    count = partial(count_tokens, bench.tokenizer, tools=tools)
    raw_rows = list(chain.from_iterable(sources.read(settings)))
    columns = dict.fromkeys(name for _, raw in raw_rows if isinstance(raw, dict) for name in raw)
    room, rows = config.model.max_seq_length - config.train.max_completion_length, []
    for number, raw in raw_rows:
        try:
            row = row_to_ask(number, raw, settings)
            if bench.environment:
                row = {"answer": ""} | raw | row  # rewards of episodes need no reference answer
                _refuse_missing(bench.environment, row)
            tokens = prompt_tokens(row["prompt"], settings, count)
            if tokens > room:
                why = f"{tokens} tokens, where {room} leave room for a completion"
                raise Fault(LONG, "prompt", why)
        except Fault as fault:
            fault.row = number
            row = {"fault": str(fault)}
        rows.append((number, row))
    if not any("prompt" in row for _, row in rows):
        why = rows[0][1]["fault"] if rows else "it holds no rows"
        raise ValueError(f"{settings.source}: nothing to ask: {why}")
    if answer_column and answer_column not in columns:
        names = ", ".join(map(str, columns))
        raise ValueError(f"{settings.source} has no column {answer_column!r}; it has {names}")
    return rows


def _refuse_missing(environment: environments.Environment, row: sources.Row) -> None:
    """Refuse a row without the columns that an episode needs."""
    try:
        environment.columns(row)
    except ValueError as error:
        raise Fault(MISSING, "", str(error)) from None


def _answer(batch: list[NumberedRow], engine: Engine, bench: Bench) -> list[Line]:
    """Return one line per row, in order; a row with a fault may have no answer."""
    questions = [row for _, row in batch if "prompt" in row]
    groups = environments.answer(
        engine,
        questions,
        bench.environment,
        max_completion_length=bench.train.max_completion_length,
        batch_size=max(1, len(questions)),
    )
    table = score_rows(questions, groups, bench)
    records = iter(table.drop(columns="row").to_dict("records"))
    lines, scores = [], {"reference", "reward", *bench.preset.names}
    for number, row in batch:
        record = next(records) if "prompt" in row else {}
        names = [name for name in record if "answer" in row or name not in scores]
        # JSON has no NaN.
        line = {name: None if record[name] != record[name] else record[name] for name in names}
        fault = {"fault": row["fault"]} if "fault" in row else {}
        lines.append({"row": number} | line | fault)
    return lines


def _summary(target: Path, lines: list[Line], names: list[str]) -> str:
    """Say how many rows and faults there are, and each reward's mean over the scored rows."""
    answers = [line for line in lines if "reference" in line]
    means = {name: np.mean([line[name] or 0 for line in answers]) for name in names if answers}
    scores = "".join(f", {name} {mean:.3f}" for name, mean in means.items())
    faults = sum("fault" in line for line in lines)
    return f"{target}: {len(lines)} rows, {faults} with a fault{scores}"
