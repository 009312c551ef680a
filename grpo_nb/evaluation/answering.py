"""Answer the same held-out prompts with each model, with the same seeds, and score the answers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import environments
from grpo_nb.evaluation.readings import reference_of
from grpo_nb.evaluation.report import DECODING, Evaluation, build, with_accuracy
from grpo_nb.models import (
    Engine,
    Policy,
    Progress,
    Sample,
    load_tokenizer,
    open_engine,
    part_of,
    trained_base,
)
from grpo_nb.models.tool_calls import opens_call
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs.config import RunConfig


class Candidate(NamedTuple):
    """Name a model to evaluate.

    label: The model's name in tables and charts.
    model: A folder, a hub name, or a loaded policy.
    adapter: The folder of a LoRA adapter to add to the model; None for no adapter.
    quantization: The precision of the loaded weights, "4bit" or "16bit".
    """

    label: str
    model: str | Path | Policy
    adapter: Path | None = None
    quantization: str = "16bit"


def run(
    candidates: Sequence[Candidate],
    rows: Sequence[dict],
    preset: RewardSet,
    config: "RunConfig",
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate every candidate on every row, with the settings of a run.

    Args:
        candidates: The models; the first one is the baseline of the comparisons.
        rows: Held-out rows, as `data.load` returns them.
        preset: The run's rewards; the first one decides what counts as correct.
        config: The run's configuration: seed, lengths, samples per prompt.
        progress: Called with the number of completions done, their total, and the candidate with
            its speed.

    Raises:
        ValueError: There are no rows or no candidates, or two candidates share a label.
        FileNotFoundError: A model or adapter does not exist. This error, and ValueError for an
            adapter that was trained on another base, are raised before any evaluation.
    """
    if not rows:
        raise ValueError("no held-out rows to evaluate on: raise data.eval_rows and run 01 again")
    return compare_models(
        candidates,
        rows,
        partial(bench_of, config, preset),
        samples=config.evaluate.samples,
        seed=config.seed,
        batch_size=config.evaluate.eval_batch_size,
        chat_template_kwargs=config.grpo.chat_template_kwargs,
        progress=progress,
    )


def compare_models(
    candidates: Sequence[Candidate],
    rows: Sequence[dict],
    bench_with: Callable[["PreTrainedTokenizerBase"], Bench],
    *,
    samples: int,
    seed: int,
    batch_size: int,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate every candidate on every row: one greedy and `samples` sampled completions.

    All candidates get the same prompts, batches, seeds and decoding; one is loaded at a time.

    Args:
        candidates: The models; the first one is the baseline of the comparisons.
        rows: Rows with a prompt and what the rewards read.
        bench_with: Returns the rewards and their conditions, for a tokenizer.
        samples: Sampled completions per prompt.
        seed: Seed of the samples and of the intervals.
        batch_size: Completions that are sampled at a time.
        chat_template_kwargs: Arguments of the chat template, as in training.
        progress: Called with the number of completions done, their total, and a note.

    Raises:
        ValueError: There are no candidates, or two share a label.
    """
    labels = [candidate.label for candidate in candidates]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"models {labels}: give at least one, each with a label of its own")
    # What is missing is reported before any model is evaluated.
    tokenizers = [_tokenizer(candidate, chat_template_kwargs) for candidate in candidates]
    benches = list(map(bench_with, tokenizers))
    tables, models, each = {}, {}, len(rows) * (1 + samples)
    for candidate, bench in zip(candidates, benches, strict=True):
        label, started = candidate.label, time.perf_counter()
        with _opened(candidate, chat_template_kwargs) as engine:
            tables[label] = answer_rows(
                engine,
                rows,
                bench,
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                progress=part_of(progress, len(tables) * each, len(candidates) * each, label),
            )
        seconds = round(time.perf_counter() - started, 1)
        adapter = candidate.adapter and str(candidate.adapter)
        models[label] = {"model": _name(candidate), "adapter": adapter}
        models[label] |= {"seconds": seconds, "engine": engine.name}
    tables, length = with_accuracy(tables, bench.preset), bench.grpo.max_completion_length
    about = {"samples": samples, "seed": seed, "max_completion_length": length}
    return Evaluation(tables, {"models": models, **build(tables, bench.preset, about)})


def _name(candidate: Candidate) -> str:
    model = candidate.model
    return model.model.name_or_path if isinstance(model, Policy) else str(model)


def _tokenizer(
    candidate: Candidate, template: Mapping[str, Any] | None
) -> "PreTrainedTokenizerBase":
    """Return a candidate's tokenizer; refuse an adapter that belongs to another base."""
    _, model, adapter, _ = candidate
    if isinstance(model, Policy):
        return model.tokenizer
    if adapter is not None:
        trained_base(str(model), Path(adapter))
    return load_tokenizer(str(model), template)


@contextmanager
def _opened(candidate: Candidate, template: Mapping[str, Any] | None) -> Iterator[Engine]:
    """Yield an engine with the candidate's model, and close what was opened."""
    _, model, adapter, quantization = candidate
    if isinstance(model, Policy):
        yield model.engine
        return
    options = {"quantization": quantization, "chat_template_kwargs": template}
    with closing(open_engine(str(model), adapter=adapter, **options)) as engine:
        yield engine


def answer_rows(
    engine: Engine,
    rows: Sequence[dict],
    bench: Bench,
    *,
    samples: int,
    seed: int,
    batch_size: int,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Answer every held-out prompt greedily and by sampling, and score the completions.

    Args:
        engine: The model's engine.
        rows: Held-out rows.
        bench: The rewards; one of them decides what counts as correct.
        samples: Sampled completions per prompt.
        seed: Seed of the samples.
        batch_size: Completions that are sampled at a time.
        progress: Called with the number of completions done, this model's total, and its speed.

    Returns:
        The records of `score_rows`, with the columns decoding and format (the first format reward).
    """
    preset, tables, total = bench.preset, [], len(rows) * (1 + samples)
    for decoding, temperature in DECODING.items():
        groups = environments.answer(
            engine,
            rows,
            bench.environment,
            max_completion_length=bench.grpo.max_completion_length,
            temperature=temperature,
            num_generations=samples if temperature else 1,
            seed=seed,
            batch_size=batch_size,
            progress=part_of(progress, sum(map(len, tables)), total),
        )
        scored = score_rows(rows, groups, bench)
        scored["decoding"] = decoding
        scored["format"] = scored[preset.format_name] if preset.format_name else float("nan")
        tables.append(scored)
    return pd.concat(tables, ignore_index=True)


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
            "reference": list(map(reference_of, questions)),
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
