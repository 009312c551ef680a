"""Compare models on held-out rows: each answers the same prompts, with the same seeds.

evaluate({"base": base, "trained": (base, "outputs/checkpoint-250")}, held_out, reward_funcs)
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from grpo_nb import environments
from grpo_nb.evaluation.report import DECODING, Evaluation, build, reference_of, with_accuracy
from grpo_nb.models import (
    Engine,
    Policy,
    Progress,
    Sample,
    open_engine,
    part_of,
    policy_of,
    trained_base,
)
from grpo_nb.models.hub import find_model
from grpo_nb.reward_lab import Bench, bench_of
from grpo_nb.reward_lab.check import right_reward
from grpo_nb.reward_lab.scoring import chats, names_of
from grpo_nb.reward_lab.table import Conditions
from grpo_nb.rewards import RewardSet, reward_set
from grpo_nb.rewards.prompts import completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs.config import RunConfig

# A folder or hub name; a base and its adapter; or a loaded model and its tokenizer.
Model = str | Path | tuple[Any, Any]


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


def evaluate(
    models: Mapping[str, Model],
    dataset: Any,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]],
    *,
    reward_weights: Sequence[float] | None = None,
    correct: str = "",
    samples: int = 4,
    max_completion_length: int = 256,
    batch_size: int = 32,
    load_in_4bit: bool = False,
    seed: int = 0,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer the same prompts with each model, score the answers, and compare the models.

    Each prompt gets one greedy and `samples` sampled completions, with the same seeds for all
    models. A model is better only if the interval of the paired difference excludes 0.

    Args:
        models: {label: model}; the first is the baseline. A model is a folder or hub name, a base
            and its adapter's folder, or a loaded model and its tokenizer (a trainer's).
        dataset: Held-out rows with TRL's column `prompt`, as chats, and what the rewards read.
        reward_funcs: The rewards, as GRPOTrainer takes them.
        reward_weights: One weight for each reward; None for 1 each.
        correct: Name of the reward that decides what is right; "" for the one that tells right
            from another row's answer, or else the first.
        samples: Sampled completions for each prompt, at temperature 1.
        max_completion_length: Length at which completions are cut [tokens].
        batch_size: Completions that are sampled at a time.
        load_in_4bit: Whether to load the bases of adapters in 4 bit, as in training.
        seed: Seed of the samples and of the intervals.
        progress: Called with the number of completions done, their total, and the model's label.

    Returns:
        The completions with their scores, {label: table}, and the report; it prints as a table
        with a sentence for each pair of models.

    Raises:
        ValueError: There are no rows, no models, or a prompt is not a chat; an adapter belongs to
            another base.
        FileNotFoundError: A model or adapter does not exist.

    Source: paired differences with a bootstrap over prompts; McNemar, Psychometrika 12, 1947.
    """
    rows = [{"answer": None} | row for row in chats(dataset)]
    rewards = _rewards(reward_funcs, reward_weights, correct, rows)
    pairs = [model for model in models.values() if isinstance(model, tuple)]
    bases = {str(base) for base, adapter in pairs if isinstance(adapter, str | Path)}
    return compare_models(
        [_candidate(*each, bases if load_in_4bit else ()) for each in models.items()],
        rows,
        lambda tokenizer: Bench(rewards, Conditions(max_completion_length), tokenizer),
        progress=progress,
        samples=samples,
        seed=seed,
        batch_size=batch_size,
    )


def _rewards(
    reward_funcs: Any, weights: Sequence[float] | None, correct: str, rows: list[dict[str, Any]]
) -> RewardSet:
    """Return the rewards as a set, with the name of the one that decides what is right."""
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    weights = [1.0] * len(funcs) if weights is None else list(weights)
    names = names_of(funcs)
    if correct and correct not in names:
        raise ValueError(f"correct = {correct!r}: give the name of a reward: {', '.join(names)}")
    correct = correct or right_reward(funcs, rows, weights) or names[0]
    return reward_set(list(zip(funcs, weights, strict=True)), correct=correct)


def _candidate(label: str, model: Model, in_4bit: Collection[str]) -> Candidate:
    """Return a model as a candidate; `in_4bit` names the models that are loaded in 4 bit."""
    base, adapter = model if isinstance(model, tuple) else (model, None)
    if adapter is not None and not isinstance(adapter, str | Path):
        return Candidate(label, policy_of(base, adapter))  # a model and its tokenizer
    quantization = "4bit" if str(base) in in_4bit else "16bit"
    return Candidate(label, base, adapter and Path(adapter), quantization)


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
        template=config.grpo.chat_template_kwargs,
        progress=progress,
        samples=config.evaluate.samples,
        seed=config.seed,
        batch_size=config.evaluate.eval_batch_size,
    )


def compare_models(
    candidates: Sequence[Candidate],
    rows: Sequence[dict],
    bench_with: Callable[["PreTrainedTokenizerBase"], Bench],
    *,
    template: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **sampling: int,
) -> Evaluation:
    """Evaluate every candidate on every row: one greedy and `samples` sampled completions.

    All candidates get the same prompts, batches, seeds and decoding; one is loaded at a time.

    Args:
        candidates: The models; the first one is the baseline of the comparisons.
        rows: Rows with a prompt and what the rewards read.
        bench_with: Returns the rewards and their conditions, for a tokenizer.
        template: Arguments of the chat template, as in training.
        progress: Called with the number of completions done, their total, and a note.
        sampling: samples, seed and batch_size of `answer_rows`.

    Raises:
        ValueError: There are no candidates, or two share a label.
    """
    labels = [candidate.label for candidate in candidates]
    if not labels or len(set(labels)) < len(labels):
        raise ValueError(f"models {labels}: give at least one, each with a label of its own")
    for _, model, adapter, _ in candidates:  # what is missing is reported before any evaluation
        if not isinstance(model, Policy):
            find_model(str(model))
        if adapter is not None:
            trained_base(str(model), Path(adapter))
    tables, models, each = {}, {}, len(rows) * (1 + sampling["samples"])
    for label, model, adapter, quantization in candidates:
        start_time = time.perf_counter()
        report = part_of(progress, len(tables) * each, len(candidates) * each, label)
        if isinstance(model, Policy):
            name, opened = model.model.name_or_path, nullcontext(model.engine)
        else:
            options = {"quantization": quantization, "chat_template_kwargs": template}
            name, opened = str(model), closing(open_engine(str(model), adapter=adapter, **options))
        with opened as engine:
            bench = bench_with(engine.tokenizer)
            tables[label] = answer_rows(engine, rows, bench, progress=report, **sampling)
        seconds = round(time.perf_counter() - start_time, 1)
        about = {"model": name, "adapter": adapter and str(adapter), "seconds": seconds}
        models[label] = about | {"engine": engine.name}
    tables, length = with_accuracy(tables, bench.preset), bench.grpo.max_completion_length
    about = {name: sampling[name] for name in ("samples", "seed")}
    report = build(tables, bench.preset, about | {"max_completion_length": length})
    return Evaluation(tables, {"models": models, **report})


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
        One record per completion: row (index in `rows`), question, reference, completion, answer
        (as extracted), tokens, truncated, level (if rows have one), each reward, reward (their
        weighted total), decoding, and format (the first format reward); for episodes also turns
        (with calls).
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
        scores = score_rows(rows, groups, bench)
        form = scores[preset.format_name] if preset.format_name else float("nan")
        tables.append(scores.assign(decoding=decoding, format=form))
    return pd.concat(tables, ignore_index=True)


def score_rows(
    rows: Sequence[dict], groups: Sequence[Sequence[Sample]], bench: Bench
) -> pd.DataFrame:
    """Tabulate and score the completions of each row; see `answer_rows`."""
    numbers = [number for number, group in enumerate(groups) for _ in group]
    samples = [sample for group in groups for sample in group]
    columns = {name: None for row in rows for name in row}  # some rows may lack one
    prompts, completions = [columns | rows[i] for i in numbers], [one.completion for one in samples]
    answers = map(bench.preset.form.extract, map(completion_text, completions))
    last_turns = [completion_text(row["prompt"][-1:]) for row in prompts]
    pairs = zip(prompts, last_turns, strict=True)
    lines = pd.DataFrame(
        {
            "row": numbers,
            "question": [row.get("question") or turn for row, turn in pairs],
            "reference": list(map(reference_of, prompts)),
            "completion": [sample.text for sample in samples],
            "answer": pd.Series(answers, dtype=object),
            "tokens": [sample.tokens for sample in samples],
            "truncated": [sample.truncated for sample in samples],
        }
    )
    if "level" in columns:
        lines["level"] = [row["level"] for row in prompts]
    lines[bench.preset.names] = scores = bench.score(prompts, completions)
    if bench.environment:
        calls = [[turn.get("tool_calls") for turn in each.messages] for each in samples]
        lines["turns"] = [sum(map(bool, each)) for each in calls]
    return lines.assign(reward=bench.totals(scores))
