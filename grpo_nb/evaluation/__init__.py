# ruff: noqa: F401 (what is imported here is what the room hands out)
"""The same held-out prompts and seeds through several models: did it get better, and how surely?"""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import environments
from grpo_nb.evaluation.controls import caused
from grpo_nb.evaluation.report import (
    DECODING,
    Evaluation,
    before_after,
    build,
    checks,
    save,
    table,
)
from grpo_nb.models import Engine, load_tokenizer, open_engine
from grpo_nb.models.chat import opens_call
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.reward_lab.baseline import passed
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.runs.config import RunConfig


class Candidate(NamedTuple):
    """A model to judge.

    label: Its name in tables and pictures.
    model: Folder or hub name.
    adapter: Folder of the adapter that is added to it; None for none.
    quantization: "4bit" or "16bit": how it is loaded.
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
    progress: Callable[[int, int, str], None] | None = None,
) -> Evaluation:
    """Every candidate answers every row, greedily once and sampled `evaluate.samples` times.

    Prompts, batches, seeds and decoding are the same for each, and each is loaded by itself.

    Args:
        candidates: The first is what the others are compared with.
        rows: Held-out rows, as `data.load` gives them.
        preset: Its first reward says "correct".
        config: Seed, lengths, samples a prompt.
        progress: Told (done, total, label) before each candidate.

    Raises:
        ValueError: No rows, no candidates, or a label twice.
        FileNotFoundError: A model or adapter that is not there; raised before any is asked.
    """
    _check(candidates, rows)
    for one in candidates:  # a model that is not there is said before any is asked
        load_tokenizer(str(one.model))
    samples, models, show = {}, {}, progress or (lambda *_: None)
    for one in candidates:
        show(len(samples), len(candidates), one.label)
        started, how = time.perf_counter(), {"adapter": one.adapter}
        how["chat_template_kwargs"] = config.model.chat_template_kwargs
        with closing(open_engine(str(one.model), quantization=one.quantization, **how)) as engine:
            samples[one.label] = evaluate_model(engine, rows, preset, config)
            seconds = round(time.perf_counter() - started, 1)
            about = {"model": str(one.model), "adapter": one.adapter and str(one.adapter)}
            models[one.label] = {**about, "seconds": seconds, "engine": engine.name}
    show(len(candidates), len(candidates), "compared")
    return Evaluation(samples, {"models": models, **build(samples, preset, config)})


def _check(candidates: Sequence[Candidate], rows: Sequence[dict]) -> None:
    labels = [one.label for one in candidates]
    if not rows:
        raise ValueError("no held-out rows to evaluate on: raise data.eval_rows and run 01 again")
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"candidates {labels}: give at least one, each with a label of its own")
    for one in candidates:
        if one.adapter is not None and not (Path(one.adapter) / "adapter_config.json").is_file():
            raise FileNotFoundError(
                f"candidate {one.label!r}: {one.adapter} holds no adapter_config.json; give the "
                "folder of a saved adapter, such as a run's train/adapter"
            )


def evaluate_model(
    engine: Engine, rows: Sequence[dict], preset: RewardSet, config: RunConfig
) -> pd.DataFrame:
    """Every held-out prompt answered greedily and sampled, and scored.

    Returns:
        A line a completion: row (its place in `rows`), question, reference, decoding, completion,
        answer (as extracted), tokens, truncated, each reward, reward (their weighted total),
        correct (the first reward in full), and "accuracy" and "format", which are the set's
        first reward and its first of format.
    """
    bench, tables = bench_of(config, preset, engine.tokenizer), []
    for decoding, temperature in DECODING.items():
        scored = answer_rows(
            engine,
            rows,
            bench,
            temperature=temperature,
            num_generations=config.evaluate.samples if temperature else 1,
            seed=config.seed,
            batch_size=config.evaluate.eval_batch_size,
        )
        scored["decoding"] = decoding
        scored["accuracy"] = scored[preset.names[0]]  # first: a reward may be named "correct"
        scored["correct"] = passed(scored, preset)
        scored["format"] = scored[preset.format_name] if preset.format_name else float("nan")
        tables.append(scored)
    return pd.concat(tables, ignore_index=True)


def answer_rows(engine: Engine, rows: Sequence[dict], bench: Bench, **how: Any) -> pd.DataFrame:
    """Completions of each row, scored where the row has a reference answer.

    Args:
        rows: Each with its prompt and question.
        how: temperature, seed and others, as `Engine.generate` takes them.

    Returns:
        A line a completion: row (its place in `rows`), question, reference, completion, answer
        (as extracted), tokens, truncated, each reward, and reward (their weighted total); of an
        episode `environments.figures` too.
    """
    cap, preset = bench.train.max_completion_length, bench.preset
    groups = environments.answer(engine, rows, bench.environment, max_completion_length=cap, **how)
    flat = [(place, one) for place, group in enumerate(groups) for one in group]
    asked, said = [rows[place] for place, _ in flat], [one.completion for _, one in flat]
    lines = pd.DataFrame(
        {
            "row": [place for place, _ in flat],
            "question": [row["question"] for row in asked],
            "reference": [row.get("answer") for row in asked],
            "completion": [one.text for _, one in flat],
            "answer": pd.Series(map(preset.extract, map(completion_text, said)), dtype=object),
            "tokens": [one.tokens for _, one in flat],
            "truncated": [one.truncated for _, one in flat],
        }
    )
    scores = np.full((len(flat), len(preset.names)), np.nan)
    if known := [place for place, row in enumerate(asked) if "answer" in row]:
        names = {name for place in known for name in asked[place]}  # a choice may lack in one
        alike = [{name: asked[place].get(name) for name in names} for place in known]
        scores[known] = bench.score(alike, [said[place] for place in known])
    lines[preset.names] = scores
    if bench.environment:
        opens = opens_call(engine.tokenizer)
        acted = pd.DataFrame([environments.figures(one.messages, opens) for _, one in flat])
        lines[list(acted)] = acted
    return lines.assign(reward=bench.totals(scores))
