"""`python -m grpo_nb answer`: a file of questions answered by a run's model, a JSON line a row."""

import json
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from grpo_nb import environments
from grpo_nb.data import sources
from grpo_nb.data.validate import LONG, MISSING, TEMPLATE, Fault, row_to_ask
from grpo_nb.evaluation import answer_rows
from grpo_nb.export import check_complete, trained_paths
from grpo_nb.models import Engine, open_engine
from grpo_nb.models.chat import count_tokens, load_tokenizer
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.rewards import RewardSet, load_rewards
from grpo_nb.runs import Run, atomic_path, refuse_unknown
from grpo_nb.runs.config import DataConfig, RunConfig
from grpo_nb.runs.files import read_json

if TYPE_CHECKING:
    pass

MODELS = ("merged", "adapter", "base")
Line = dict[str, Any]
Numbered = tuple[int, sources.Row]  # a row and its number in the source


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
    """Ask every row of a file, greedily; the target is written whole, at the end.

    A line of the target: row (its number in the source), question, completion, answer (as
    extracted), tokens, truncated; where the row has a reference answer also
    reference (that answer), each reward, and reward (their weighted total). What cannot be asked
    has a `fault` alone; a reference answer that cannot be used is one as well, beside the answer.

    Args:
        source: CSV, TSV, JSON, JSON lines or Parquet.
        target: JSON lines.
        model: "merged", or "adapter" or "base" in the weights of the training.
        question_column: Default: as in the run's data.
        answer_column: Reference answers; default: as in the run's data, where the source has it.
        engine: As `open_engine` takes it.

    Returns:
        A line for the reader: how many rows, how many faults, mean scores.

    Raises:
        FileNotFoundError: No such source, or no such model in the run.
        ValueError: No row can be asked, the target exists, or the merged model is of an earlier
            training.
    """
    if target.exists():
        raise ValueError(f"{target} exists: choose another target, or remove it")
    config, weights = run.config(), weights_of(run, model)
    trained = read_json(run / "data/report.json")["columns"]
    asked = (question_column or trained["question"], answer_column or trained["answer"])
    data = _questions(config, source, *asked)
    template = config.model.chat_template_kwargs
    tokenizer = load_tokenizer(weights["model_path"], template)
    bench = bench_of(config, load_rewards(config.rewards), tokenizer)
    rows, lines = _read(data, answer_column, config, bench), []
    size = config.evaluate.eval_batch_size
    with closing(open_engine(**weights, engine=engine, chat_template_kwargs=template)) as opened:
        for start in tqdm(range(0, len(rows), size), unit=" batches"):
            lines += _answer(rows[start : start + size], opened, bench)
    # Half a surrogate pair, which a fault may quote, becomes JSON's escape of it.
    text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
    with atomic_path(target) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n", errors="backslashreplace")
    return _summary(target, lines, bench.preset.names)


def _questions(config: RunConfig, source: Path, question: str, answer: str) -> DataConfig:
    """The run's data settings, for this file."""
    if not source.is_file():
        raise FileNotFoundError(f"{source} is not a file: give a table of questions")
    change = {"source": str(source.resolve()), "max_rows": 0, "sft_rows": 0}
    change |= {"question_column": question, "answer_column": answer}
    change["system_prompt"] = system_prompt(config, load_rewards(config.rewards))
    return config.data.model_copy(update=change)


def weights_of(run: Run, model: str) -> dict[str, Any]:
    """What `open_engine` loads.

    Args:
        run: It was trained.
        model: "merged", "adapter" or "base".

    Raises:
        ValueError: The merged model is of an earlier training.
        FileNotFoundError: No complete merged model, or no adapter.
    """
    refuse_unknown("model", model, list(MODELS))
    if model == "merged":
        run.refuse_stale()
        folder = str(check_complete(run / "model/merged").resolve())
        return {"model_path": folder, "adapter": None, "quantization": "16bit"}
    config = run.config()
    base, policy, adapter = trained_paths(run, config)
    path, adapter = (base, None) if model == "base" else (policy, adapter)
    return {"model_path": path, "adapter": adapter, "quantization": config.model.quantization}


def _read(
    data: DataConfig,
    answer_column: str,
    config: RunConfig,
    bench: Bench,
) -> list[Numbered]:
    """The rows of the source as the model is asked them; one with no prompt has a fault."""
    tools = environments.tools_of(config, bench.tokenizer)
    given = list(chain.from_iterable(sources.read(data)))
    columns = dict.fromkeys(name for _, raw in given if isinstance(raw, dict) for name in raw)
    room, rows = config.model.max_seq_length - config.train.max_completion_length, []
    for number, raw in given:
        try:
            row = row_to_ask(number, raw, data)
            if bench.environment:
                row = _beginning(bench.environment, number, {"answer": "", **raw, **row})
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
        known = ", ".join(map(str, columns))
        raise ValueError(f"{data.source} has no column {answer_column!r}; it has {known}")
    return rows


def _beginning(environment: environments.Environment, number: int, row: sources.Row) -> sources.Row:
    """The row, which an episode can begin with; what it earns needs no reference answer."""
    try:
        environment.columns(row)
    except ValueError as error:
        raise Fault(MISSING, "", str(error), number) from None
    return row


def _answer(batch: list[Numbered], engine: Engine, bench: Bench) -> list[Line]:
    """A line for each row, in order; one with a fault may have no answer."""
    asked = [row for _, row in batch if "prompt" in row]
    table = answer_rows(engine, asked, bench, batch_size=max(1, len(asked)))
    found = iter(table.drop(columns="row").to_dict("records"))
    lines, of_reference = [], {"reference", "reward", *bench.preset.names}
    for number, row in batch:
        line = {"row": number}
        for name, value in next(found).items() if "prompt" in row else ():
            if "answer" in row or name not in of_reference:
                line[name] = None if value != value else value  # JSON knows no NaN
        lines.append(line | {key: row[key] for key in ("fault",) if key in row})
    return lines


def _summary(target: Path, lines: list[Line], names: list[str]) -> str:
    """How many rows and faults, and each reward's mean over rows with a reference answer."""
    scored, faults = [line for line in lines if "reference" in line], ["fault" in x for x in lines]
    means = {name: np.mean([line[name] or 0 for line in scored]) for name in names if scored}
    said = "".join(f", {name} {mean:.3f}" for name, mean in means.items())
    return f"{target}: {len(lines)} rows, {sum(faults)} with a fault{said}"


def system_prompt(config: RunConfig, preset: RewardSet) -> str:
    """What stood above each question in the training."""
    given = config.data.system_prompt
    return preset.form.system_prompt if given == "preset" else given
