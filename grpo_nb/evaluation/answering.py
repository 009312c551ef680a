"""Answer the same held-out prompts with each model, with the same seeds, and score the answers."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np
import pandas as pd

from grpo_nb import environments
from grpo_nb.environments.cache import Cache, answer_cached, row_key
from grpo_nb.evaluation.report import DECODING, UNFINISHED, Evaluation, build, with_accuracy
from grpo_nb.files import digests
from grpo_nb.models import (
    Engine,
    Progress,
    Sample,
    load_tokenizer,
    open_engine,
    part_of,
    trained_base,
)
from grpo_nb.models.hub import find_model
from grpo_nb.models.tool_calls import opens_call
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import completion_text

if TYPE_CHECKING:
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import RunConfig


class Candidate(NamedTuple):
    """Name a model to evaluate.

    label: The model's name in tables and charts.
    model: A folder or hub name.
    adapter: The folder of a LoRA adapter to add to the model; None for no adapter.
    quantization: The precision of the loaded weights, "4bit" or "16bit".
    """

    label: str
    model: str | Path
    adapter: Path | None = None
    quantization: str = "16bit"


def run(
    candidates: Sequence[Candidate],
    rows: Sequence[dict],
    preset: RewardSet,
    config: "RunConfig",
    progress: Progress | None = None,
    run: "Run | None" = None,
) -> Evaluation:
    """Evaluate every candidate on every row: one greedy and `evaluate.samples` sampled completions.

    All candidates get the same prompts, batches, seeds and decoding; one is loaded at a time.

    Args:
        candidates: The models; the first one is the baseline of the comparisons.
        rows: Held-out rows, as `data.load` returns them.
        preset: The run's rewards; the first one decides what counts as correct.
        config: The run's configuration: seed, lengths, samples per prompt.
        progress: Called with the number of completions done, their total, and the candidate with
            its speed.
        run: The run in whose folder completions are kept until `save`, so that an interrupted
            evaluation can resume; None to keep nothing. Scores are always computed anew.

    Raises:
        ValueError: There are no rows or no candidates, or two candidates share a label.
        FileNotFoundError: A model or adapter does not exist. This error, and ValueError for an
            adapter that was trained on another base, are raised before any evaluation.
    """
    labels = [candidate.label for candidate in candidates]
    if not rows:
        raise ValueError("no held-out rows to evaluate on: raise data.eval_rows and run 01 again")
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"candidates {labels}: give at least one, each with a label of its own")
    for _, model, adapter, _ in candidates:  # report a missing model before any is evaluated
        load_tokenizer(str(model))
        if adapter is not None:
            trained_base(str(model), Path(adapter))
    samples, models, each = {}, {}, len(rows) * (1 + config.evaluate.samples)
    for candidate in candidates:
        label, model, adapter, _ = candidate
        report = part_of(progress, len(samples) * each, len(candidates) * each, label)
        tokenizer = load_tokenizer(str(model), config.grpo.chat_template_kwargs)
        bench, started = bench_of(config, preset, tokenizer), time.perf_counter()
        caches = _caches(run, candidate, rows, config)
        show = f"{label}, the first completion" if progress else ""
        with ExitStack() as stack:
            opened = cache(partial(_open, candidate, config, stack))
            samples[label] = evaluate_model(opened, rows, bench, config, report, caches, show)
            engine = opened().name if opened.cache_info().currsize else "none: all were kept"
        seconds = round(time.perf_counter() - started, 1)
        about = {"model": str(model), "adapter": adapter and str(adapter)}
        models[label] = {**about, "seconds": seconds, "engine": engine}
    samples = with_accuracy(samples, preset)
    return Evaluation(samples, {"models": models, **build(samples, preset, config)})


def _open(candidate: Candidate, config: "RunConfig", stack: ExitStack) -> Engine:
    """Return an engine with the candidate's model; `stack` closes it at the end."""
    _, model, adapter, quantization = candidate
    template = config.grpo.chat_template_kwargs
    options = {"adapter": adapter, "quantization": quantization, "chat_template_kwargs": template}
    return stack.enter_context(closing(open_engine(str(model), **options)))


def _caches(
    run: "Run | None", candidate: Candidate, rows: Sequence[dict], config: "RunConfig"
) -> dict[str, Cache]:
    """Return {decoding mode: cache}; {} if there is no run.

    A cache's settings hold everything that its completions depend on.
    """
    if run is None:
        return {}
    environment = environments.of(config)
    model = Path(find_model(str(candidate.model)))
    settings = {
        "model": [str(candidate.model), digests(model, "*")],
        "adapter": candidate.adapter and digests(candidate.adapter, "*"),
        "quantization": candidate.quantization,
        "chat_template_kwargs": config.grpo.chat_template_kwargs,
        "max_completion_length": config.grpo.max_completion_length,
        "evaluate": config.evaluate.model_dump(include={"samples", "eval_batch_size"}),
        "seed": config.seed,
        "environment": environments.identity(environment),
        "rows": [row_key(row, environment) for row in rows],
    }
    name = quote(candidate.label, safe="")
    return {
        decoding: Cache(run / UNFINISHED / f"{name}.{decoding}.parquet", settings)
        for decoding in DECODING
    }


def evaluate_model(
    opened: Callable[[], Engine],
    rows: Sequence[dict],
    bench: Bench,
    config: "RunConfig",
    progress: Progress | None = None,
    caches: Mapping[str, Cache] | None = None,
    show: str = "",
) -> pd.DataFrame:
    """Answer every held-out prompt greedily and by sampling, and score the completions.

    Args:
        opened: Returns the model's engine; called only if a completion is not in the caches.
        rows: Held-out rows, as `data.load` returns them.
        bench: The run's rewards; the first one decides what counts as correct.
        config: The run's configuration: seed, lengths, samples per prompt.
        progress: Called with the number of completions done, this model's total, and its speed.
        caches: {decoding mode: cache of the completions}; None for no caches.
        show: What to print before the first completion; "" prints nothing.

    Returns:
        One record per completion: row (index in `rows`), question, reference, decoding, completion,
        answer (as extracted), tokens, truncated, each reward, reward (their weighted total),
        format (the first format reward), and correct and accuracy (see `with_accuracy`).
    """
    return answer_rows(
        opened,
        rows,
        bench,
        samples=config.evaluate.samples,
        seed=config.seed,
        batch_size=config.evaluate.eval_batch_size,
        progress=progress,
        caches=caches,
        show=show,
    )


def answer_rows(
    opened: Callable[[], Engine],
    rows: Sequence[dict],
    bench: Bench,
    *,
    samples: int,
    seed: int,
    batch_size: int,
    progress: Progress | None = None,
    caches: Mapping[str, Cache] | None = None,
    show: str = "",
) -> pd.DataFrame:
    """Do the work of `evaluate_model`, with `samples` sampled completions a row."""
    preset, tables, total = bench.preset, [], len(rows) * (1 + samples)
    for decoding, temperature in DECODING.items():
        groups = answer_cached(
            (caches or {}).get(decoding, Cache(None, {})),
            rows,
            bench.environment,
            opened,
            max_completion_length=bench.grpo.max_completion_length,
            temperature=temperature,
            num_generations=samples if temperature else 1,
            seed=seed,
            batch_size=batch_size,
            progress=part_of(progress, sum(map(len, tables)), total),
            show="" if temperature else show,
        )
        scored = score_rows(rows, groups, bench)
        scored["decoding"] = decoding
        scored["format"] = scored[preset.format_name] if preset.format_name else float("nan")
        tables.append(scored)
    return with_accuracy({"": pd.concat(tables, ignore_index=True)}, preset)[""]


def score_rows(
    rows: Sequence[dict], groups: Sequence[Sequence[Sample]], bench: Bench
) -> pd.DataFrame:
    """Tabulate the completions, and score those of rows that have a reference answer.

    Args:
        rows: Rows with a question, and with the reference answer if it is known.
        groups: The completions of each row.
        bench: The rewards, with the environment.

    Returns:
        One record per completion: row (index in `rows`), question, reference, completion, answer
        (as extracted), tokens, truncated, each reward, and reward (their weighted total); for
        episodes also `environments.figures`.
    """
    preset = bench.preset
    numbers = [number for number, group in enumerate(groups) for _ in group]
    samples = [sample for group in groups for sample in group]
    questions, completions = [rows[i] for i in numbers], [sample.completion for sample in samples]
    answers = map(preset.extract, map(completion_text, completions))
    lines = pd.DataFrame(
        {
            "row": numbers,
            "question": list(map(_question, questions)),
            "reference": [row.get("answer") for row in questions],
            "completion": [sample.text for sample in samples],
            "answer": pd.Series(answers, dtype=object),
            "tokens": [sample.tokens for sample in samples],
            "truncated": [sample.truncated for sample in samples],
        }
    )
    scores = np.full((len(samples), len(preset.names)), np.nan)
    if scorable := [i for i, row in enumerate(questions) if "answer" in row]:
        names = {name for i in scorable for name in questions[i]}  # some rows may lack a column
        uniform = [{name: questions[i].get(name) for name in names} for i in scorable]
        scores[scorable] = bench.score(uniform, [completions[i] for i in scorable])
    lines[preset.names] = scores
    if bench.environment:
        opens = opens_call(bench.tokenizer)
        counts = pd.DataFrame([environments.figures(each.messages, opens) for each in samples])
        lines[list(counts)] = counts
    return lines.assign(reward=bench.totals(scores))


def _question(row: dict) -> str:
    """Return a row's question: the last turn of its prompt, where no column holds it."""
    return row.get("question") or completion_text(row["prompt"][-1:])
