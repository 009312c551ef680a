"""`python -m grpo_nb answer`: answer a file of questions with a run's model, as JSON lines."""

import json
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from grpo_nb import environments
from grpo_nb.data import sources
from grpo_nb.data.validate import LONG, MISSING, TEMPLATE, Fault, row_to_ask
from grpo_nb.evaluation.comparison import score_rows
from grpo_nb.export import check_complete, trained_paths
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
Numbered = tuple[int, sources.Row]  # a row with its number in the source


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
    extracted), tokens and truncated; if the row has a reference answer also reference, each
    reward, and reward (their weighted total). A row that cannot be asked has only a `fault`; an
    unusable reference answer is a `fault` beside the completion.

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
    trained = read_json(run / "data/report.json")["columns"]
    columns = (question_column or trained["question"], answer_column or trained["answer"])
    data = _questions(config, source, *columns)
    tokenizer = load_tokenizer(weights["model_path"], weights["chat_template_kwargs"])
    bench = bench_of(config, load_rewards(config.rewards), tokenizer)
    rows, lines = _read(data, answer_column, config, bench), []
    size = config.evaluate.eval_batch_size
    with closing(open_engine(**weights, engine=engine)) as opened:
        for start in tqdm(range(0, len(rows), size), unit=" batches"):
            lines += _answer(rows[start : start + size], opened, bench)
    # A fault may quote half a surrogate pair, which becomes a JSON escape.
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n", errors="backslashreplace")
    return _summary(target, lines, bench.preset.names)


def _questions(config: RunConfig, source: Path, question: str, answer: str) -> DataConfig:
    """Return the run's data settings, changed to read this file."""
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file: give a table of questions")
    change = {"source": str(source.resolve()), "max_rows": 0, "sft_rows": 0}
    change |= {"question_column": question, "answer_column": answer}
    change["system_prompt"] = system_prompt(config, load_rewards(config.rewards))
    return config.data.model_copy(update=change)


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
        folder = str(check_complete(run / "model/merged").resolve())
        return {"model_path": folder, "adapter": None, "quantization": "16bit", **template}
    base, path, adapter = trained_paths(run, config)
    if model == "base":
        path, adapter = base, None
    quantization = config.model.quantization
    return {"model_path": path, "adapter": adapter, "quantization": quantization, **template}


def _read(
    data: DataConfig,
    answer_column: str,
    config: RunConfig,
    bench: Bench,
) -> list[Numbered]:
    """Read the rows and build their prompts; a row without a prompt has a fault."""
    tools = environments.tools_of(config, bench.tokenizer)
    raw_rows = list(chain.from_iterable(sources.read(data)))
    columns = dict.fromkeys(name for _, raw in raw_rows if isinstance(raw, dict) for name in raw)
    room, rows = config.model.max_seq_length - config.train.max_completion_length, []
    for number, raw in raw_rows:
        try:
            row = row_to_ask(number, raw, data)
            if bench.environment:
                row = {"answer": "", **raw, **row}  # rewards of episodes need no reference answer
                _check_columns(bench.environment, number, row)
            [tokens] = count_tokens(bench.tokenizer, [row["prompt"]], tools)
            if tokens > room:
                why = f"{tokens} tokens, where {room} leave room for a completion"
                raise Fault(LONG, "prompt", why, number)
        except Fault as fault:
            row = {"fault": str(fault)}
        except ValueError as error:  # of the chat template
            row = {"fault": str(Fault(TEMPLATE, data.question_column, str(error), number))}
        rows.append((number, row))
    if not any("prompt" in row for _, row in rows):
        why = rows[0][1]["fault"] if rows else "it holds no rows"
        raise ValueError(f"{data.source}: nothing to ask: {why}")
    if answer_column and answer_column not in columns:
        names = ", ".join(map(str, columns))
        raise ValueError(f"{data.source} has no column {answer_column!r}; it has {names}")
    return rows


def _check_columns(environment: environments.Environment, number: int, row: sources.Row) -> None:
    """Raise a Fault unless the row has the columns that an episode needs."""
    try:
        environment.columns(row)
    except ValueError as error:
        raise Fault(MISSING, "", str(error), number) from None


def _answer(batch: list[Numbered], engine: Engine, bench: Bench) -> list[Line]:
    """Return one line per row, in order; a row with a fault may have no answer."""
    asked = [row for _, row in batch if "prompt" in row]
    how = {"max_completion_length": bench.train.max_completion_length}
    how["batch_size"] = max(1, len(asked))
    table = score_rows(asked, environments.answer(engine, asked, bench.environment, **how), bench)
    records = iter(table.drop(columns="row").to_dict("records"))
    lines, needs_reference = [], {"reference", "reward", *bench.preset.names}
    for number, row in batch:
        line = {"row": number}
        for name, value in next(records).items() if "prompt" in row else ():
            if "answer" in row or name not in needs_reference:
                line[name] = None if value != value else value  # JSON has no NaN
        lines.append(line | {key: row[key] for key in ("fault",) if key in row})
    return lines


def _summary(target: Path, lines: list[Line], names: list[str]) -> str:
    """Say how many rows and faults there are, and each reward's mean over the scored rows."""
    scored, faults = [line for line in lines if "reference" in line], ["fault" in x for x in lines]
    means = {name: np.mean([line[name] or 0 for line in scored]) for name in names if scored}
    scores = "".join(f", {name} {mean:.3f}" for name, mean in means.items())
    return f"{target}: {len(lines)} rows, {sum(faults)} with a fault{scores}"


def system_prompt(config: RunConfig, preset: RewardSet) -> str:
    """Return the system prompt of the training."""
    prompt = config.data.system_prompt
    return preset.form.system_prompt if prompt == "preset" else prompt
