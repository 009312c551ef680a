"""Answer a file of questions with a run's model: `python -m grpo_nb answer` writes JSON lines."""

from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from grpo_nb import environments
from grpo_nb.data import sources
from grpo_nb.data.rows import LONG, MISSING, prompt_tokens, row_to_ask
from grpo_nb.evaluation.answering import score_rows
from grpo_nb.export import refuse_incomplete, trained_paths
from grpo_nb.files import atomic_path, read_json
from grpo_nb.models import open_engine
from grpo_nb.models.hub import load_tokenizer
from grpo_nb.models.template import count_tokens
from grpo_nb.names import refuse_unknown
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.rewards import load_rewards

if TYPE_CHECKING:
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import RunConfig


def answer_file(
    run: "Run",
    source: Path,
    target: Path,
    *,
    model: str = "merged",
    question_column: str = "",
    answer_column: str = "",
    engine: str = "detect",
) -> str:
    """Answer every row of a file greedily, and write the target at the end, atomically.

    A line of the target has row (the number in the source), question, reference, completion, answer
    (as extracted), tokens, truncated, each reward, and reward (their weighted total). Without a
    usable reference answer, reference and scores are null.

    Args:
        run: A trained run.
        source: A file of questions: CSV, TSV, JSON, JSON lines or Parquet.
        target: The file of JSON lines to write.
        model: "merged"; or "adapter" or "base", in the precision used in training.
        question_column: The column of questions; by default that of the run's data.
        answer_column: The column of reference answers; by default that of the run's data, if the
            file has it.
        engine: The engine, as `open_engine` takes it.

    Returns:
        A sentence for the user: number of rows, mean scores.

    Raises:
        FileNotFoundError: The source, or the model in the run, does not exist.
        ValueError: A row has no usable question, the target exists, or the merged model is out of
            date.
    """
    if target.exists():
        raise ValueError(f"{target} exists: choose another target, or remove it")
    config, weights = run.config(), weights_of(run, model)
    preset = load_rewards(config.rewards)
    tokenizer = load_tokenizer(weights["model_path"], weights["chat_template_kwargs"])
    bench = bench_of(config, preset, tokenizer)
    columns = read_json(run / "data/report.json")["columns"]
    changes = {
        "source": str(source.resolve()),
        "max_rows": 0,
        "sft_rows": 0,
        "question_column": question_column or columns["question"],
        "answer_column": answer_column or columns["answer"],
        "image_column": columns.get("image", ""),
    }
    if config.data.system_prompt == "preset":
        changes["system_prompt"] = preset.form.system_prompt
    settings = sources.changed(config.data, **changes)
    numbers, rows = _read(settings, answer_column, config, bench)
    with closing(open_engine(**weights, engine=engine)) as opened, tqdm(total=len(rows)) as bar:
        groups = environments.answer(
            opened,
            rows,
            bench.environment,
            max_completion_length=config.grpo.max_completion_length,
            batch_size=config.evaluate.eval_batch_size,
            progress=lambda done, _, note: bar.set_postfix_str(note) or bar.update(done - bar.n),
        )
    table = score_rows(rows, groups, bench).assign(row=numbers)
    form = {"orient": "records", "lines": True, "force_ascii": False, "double_precision": 15}
    with atomic_path(target) as temporary:
        table.to_json(temporary, **form)
    scored = table[table["reference"].notna()]
    means = scored[preset.names].fillna(0).mean().dropna()
    scores = "".join(f", {name} {mean:.3f}" for name, mean in means.items())
    return f"{target}: {len(rows)} rows, {len(scored)} with a reference answer{scores}"


def weights_of(run: "Run", model: str) -> dict[str, Any]:
    """Return the arguments with which `open_engine` loads a run's model.

    Args:
        run: A trained run.
        model: "merged", "adapter" or "base".

    Raises:
        ValueError: The merged model is out of date.
        FileNotFoundError: There is no complete merged model, or no adapter.
    """
    refuse_unknown("model", model, ["merged", "adapter", "base"])
    config = run.config()
    if model == "merged":
        run.refuse_outdated()
        path, adapter = str(refuse_incomplete(run / "model/merged").resolve()), None
    else:
        base, path, adapter = trained_paths(run, config)
        path, adapter = (path, adapter) if model == "adapter" else (base, None)
    return {
        "model_path": path,
        "adapter": adapter,
        "quantization": "16bit" if model == "merged" else config.model.quantization,
        "chat_template_kwargs": config.grpo.chat_template_kwargs,
    }


def _read(
    settings: sources.Options, answer_column: str, config: "RunConfig", bench: Bench
) -> tuple[list[int], list[sources.Row]]:
    """Return the numbers of the rows in the source, and the rows with their prompts."""
    tools = environments.tools_of(config, bench.tokenizer)
    count = partial(count_tokens, bench.tokenizer, tools=tools)
    room = config.model.max_seq_length - config.grpo.max_completion_length
    numbers, rows = [], []
    for number, raw in sources.read(settings):
        try:
            row = row_to_ask(raw, settings)
            if answer_column and answer_column not in raw:
                there = f"the row has {', '.join(map(str, raw))}"
                raise sources.Fault(MISSING, answer_column, there)
            tokens = prompt_tokens(row["prompt"], settings, count)
            if tokens > room:
                why = f"{tokens} tokens; with more than {room} there is no room for a completion"
                raise sources.Fault(LONG, "prompt", why)
        except sources.Fault as fault:
            fault.row = number
            raise ValueError(f"{settings.source}: {fault}") from None
        if bench.environment:
            row = {"answer": ""} | raw | row  # rewards of episodes need no reference answer
            bench.environment.columns(row)
        numbers.append(number)
        rows.append(row)
    if not rows:
        raise ValueError(f"{settings.source} holds no rows")
    return numbers, rows
