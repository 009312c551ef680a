"""Compare models on the same held-out prompts and seeds: is one better, and how surely?"""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import environments
from grpo_nb.evaluation.report import DECODING, Evaluation, build
from grpo_nb.models import Engine, Progress, load_tokenizer, open_engine, part_of, trained_base
from grpo_nb.models.tool_calls import opens_call
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.reward_lab.baseline import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.runs.config import RunConfig


class Candidate(NamedTuple):
    """A model to evaluate.

    label: The model's name in tables and charts.
    model: A folder or hub name.
    adapter: The folder of a LoRA adapter to add to the model; None for none.
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
    config: RunConfig,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate every candidate on every row: one greedy and `evaluate.samples` sampled completions.

    All candidates get the same prompts, batches, seeds and decoding; one is loaded at a time.

    Args:
        candidates: The models; the first one is the baseline of the comparisons.
        rows: Held-out rows, as `data.load` returns them.
        preset: The run's rewards; the first one decides what counts as correct.
        config: The run's configuration: seed, lengths, samples per prompt.
        progress: Called with completions done, all of them, and the candidate with its speed.

    Raises:
        ValueError: There are no rows or no candidates, or two candidates share a label.
        FileNotFoundError: A model or adapter does not exist; raised before any is evaluated, as is
            the ValueError of an adapter that was trained on another base.
    """
    labels = [candidate.label for candidate in candidates]
    if not rows:
        raise ValueError("no held-out rows to evaluate on: raise data.eval_rows and run 01 again")
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"candidates {labels}: give at least one, each with a label of its own")
    for _, model, adapter, _ in candidates:  # report what is missing before any is evaluated
        load_tokenizer(str(model))
        if adapter is not None:
            trained_base(str(model), Path(adapter))
    samples, models = {}, {}
    each = len(rows) * (1 + config.evaluate.samples)
    for label, model, adapter, quantization in candidates:
        report = part_of(progress, len(samples) * each, len(candidates) * each, label)
        started, options = time.perf_counter(), {"adapter": adapter, "quantization": quantization}
        options["chat_template_kwargs"] = config.model.chat_template_kwargs
        with closing(open_engine(str(model), **options)) as engine:
            samples[label] = evaluate_model(engine, rows, preset, config, report)
            seconds = round(time.perf_counter() - started, 1)
            about = {"model": str(model), "adapter": adapter and str(adapter)}
            models[label] = {**about, "seconds": seconds, "engine": engine.name}
    return Evaluation(samples, {"models": models, **build(samples, preset, config)})


def evaluate_model(
    engine: Engine,
    rows: Sequence[dict],
    preset: RewardSet,
    config: RunConfig,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Answer every held-out prompt greedily and by sampling, and score the completions.

    Args:
        engine: The model.
        rows: Held-out rows, as `data.load` returns them.
        preset: The run's rewards; the first one decides what counts as correct.
        config: The run's configuration: seed, lengths, samples per prompt.
        progress: Called with completions done, all of this model, and its speed.

    Returns:
        One line per completion: row (index in `rows`), question, reference, decoding, completion,
        answer (as extracted), tokens, truncated, each reward, reward (their weighted total),
        correct (whether the first reward is earned in full), accuracy (the first reward) and
        format (the first format reward).
    """
    bench, tables = bench_of(config, preset, engine.tokenizer), []
    total = len(rows) * (1 + config.evaluate.samples)
    for decoding, temperature in DECODING.items():
        scored = answer_rows(
            engine,
            rows,
            bench,
            temperature=temperature,
            num_generations=config.evaluate.samples if temperature else 1,
            seed=config.seed,
            batch_size=config.evaluate.eval_batch_size,
            progress=part_of(progress, sum(map(len, tables)), total),
        )
        scored["decoding"] = decoding
        scored["accuracy"] = scored[preset.names[0]]  # first, as a reward may be named "correct"
        scored["correct"] = passed(scored, preset)
        scored["format"] = scored[preset.format_name] if preset.format_name else float("nan")
        tables.append(scored)
    return pd.concat(tables, ignore_index=True)


def answer_rows(engine: Engine, rows: Sequence[dict], bench: Bench, **how: Any) -> pd.DataFrame:
    """Answer each row, and score the completions of rows that have a reference answer.

    Args:
        engine: The model.
        rows: Rows with a prompt and a question, and if known with the reference answer.
        bench: The rewards, with the environment and the longest completion.
        how: temperature, seed and others, as `Engine.generate` takes them.

    Returns:
        One line per completion: row (index in `rows`), question, reference, completion, answer
        (as extracted), tokens, truncated, each reward, and reward (their weighted total); for
        episodes also `environments.figures`.
    """
    cap, preset = bench.train.max_completion_length, bench.preset
    groups = environments.answer(engine, rows, bench.environment, max_completion_length=cap, **how)
    numbers = [number for number, group in enumerate(groups) for _ in group]
    samples = [sample for group in groups for sample in group]
    asked, completions = [rows[i] for i in numbers], [sample.completion for sample in samples]
    answers = map(preset.extract, map(completion_text, completions))
    lines = pd.DataFrame(
        {
            "row": numbers,
            "question": [row["question"] for row in asked],
            "reference": [row.get("answer") for row in asked],
            "completion": [sample.text for sample in samples],
            "answer": pd.Series(answers, dtype=object),
            "tokens": [sample.tokens for sample in samples],
            "truncated": [sample.truncated for sample in samples],
        }
    )
    scores = np.full((len(samples), len(preset.names)), np.nan)
    if scorable := [i for i, row in enumerate(asked) if "answer" in row]:
        names = {name for i in scorable for name in asked[i]}  # some rows may lack a column
        uniform = [{name: asked[i].get(name) for name in names} for i in scorable]
        scores[scorable] = bench.score(uniform, [completions[i] for i in scorable])
    lines[preset.names] = scores
    if bench.environment:
        opens = opens_call(engine.tokenizer)
        counts = pd.DataFrame([environments.figures(each.messages, opens) for each in samples])
        lines[list(counts)] = counts
    return lines.assign(reward=bench.totals(scores))
