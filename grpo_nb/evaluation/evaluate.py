"""Compare models on held-out rows: each model answers the same prompts, with the same seeds.

evaluate({"base": base, "trained": (base, "outputs/checkpoint-250")}, held_out, reward_funcs)
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import environments
from grpo_nb.evaluation.report import DECODING, Evaluation, build, reference_of, with_accuracy
from grpo_nb.models import (
    Engine,
    Progress,
    Sample,
    open_engine,
    part_of,
    policy_of,
    trained_base,
)
from grpo_nb.models.hub import find_model
from grpo_nb.models.weights import ADAPTER_CONFIG
from grpo_nb.reward_lab import Bench
from grpo_nb.reward_lab.check import right_reward
from grpo_nb.reward_lab.scoring import chats, names_of
from grpo_nb.reward_lab.table import Conditions
from grpo_nb.rewards import RewardSet, load_rewards, reward_set
from grpo_nb.rewards.prompts import completion_text

if TYPE_CHECKING:
    from grpo_nb.runs.config import RunConfig

# A folder or hub name; a base and its adapter; or a loaded model and its tokenizer.
Model = str | Path | tuple[Any, Any]


def evaluate(
    models: Mapping[str, Model],
    dataset: Any,
    reward_funcs: Callable[..., Any] | Sequence[Callable[..., Any]] | RewardSet,
    *,
    reward_weights: Sequence[float] | None = None,
    correct: str = "",
    samples: int = 4,
    max_completion_length: int = 256,
    batch_size: int = 32,
    load_in_4bit: bool = False,
    seed: int = 0,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    environment: environments.Environment | type | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer the same prompts with each model, score the answers, and compare the models.

    Each prompt gets one greedy and `samples` sampled completions, with the same seeds for all
    models. A model is better only if the interval of the paired difference excludes 0, and, without
    partial credit, McNemar's p is below 0.05.

    Args:
        models: {label: model}; the first is the baseline. A model is a folder or hub name, a base
            and its adapter's folder, or a loaded model (such as a trainer's) and its tokenizer.
        dataset: Held-out rows with TRL's column `prompt` (chats) and the columns of the rewards.
        reward_funcs: The rewards, as GRPOTrainer takes them, or a reward set.
        reward_weights: One weight for each reward; None for 1 each.
        correct: Name of the reward that decides what is right; "" for the one that best tells a
            right answer from another row's answer, or else the first reward.
        samples: Sampled completions for each prompt, at temperature 1.
        max_completion_length: Length at which completions are cut [tokens].
        batch_size: Completions that are sampled at a time.
        load_in_4bit: Whether to load the baseline and the bases of adapters in 4 bit, as in
            training.
        seed: Seed of the samples and of the intervals.
        chat_template_kwargs: Arguments of the chat template, as in training.
        environment: The environment in which episodes are played, or the author's class; None if
            the task has no environment.
        progress: Called with the number of completions done, their total, and the model's label
            with its speed.

    Returns:
        The completions with their scores, {label: table}, and the report. An `Evaluation` prints
        as a table with a sentence for each pair of models.

    Raises:
        ValueError: There are no rows, no models, or a prompt is not a chat; an adapter belongs to
            another base; samples or reward_weights do not fit.
        FileNotFoundError: A model or adapter does not exist.

    Source: paired differences with a bootstrap over prompts; McNemar, Psychometrika 12, 1947.
    """
    if not models:
        raise ValueError("models = {}: give at least one, with its label")
    if samples < 1:
        raise ValueError(f"samples = {samples}: give at least 1")
    rows = [{"answer": None} | row for row in chats(dataset)]
    rewards = reward_funcs
    if not isinstance(rewards, RewardSet):
        rewards = _rewards(reward_funcs, reward_weights, correct, rows)
    parts = {label: _parts(model) for label, model in models.items()}
    if isinstance(environment, type):
        environment = environments.Environment(environment)
    bench = Bench(rewards, Conditions(max_completion_length), None, False, environment)
    sampling = {"samples": samples, "seed": seed, "batch_size": batch_size}
    bases = {base for base, adapter, _ in parts.values() if adapter}
    bases |= {base for base, *_ in list(parts.values())[:1]}  # the baseline
    tables, facts, each = {}, {}, len(rows) * (1 + samples)
    for label, (base, adapter, engine) in parts.items():
        start_time = time.perf_counter()
        report = part_of(progress, len(tables) * each, len(models) * each, label)
        quantization = "4bit" if load_in_4bit and base in bases else "16bit"
        how = {"quantization": quantization, "chat_template_kwargs": chat_template_kwargs}
        new = None if engine else open_engine(base, adapter=adapter, **how)
        with closing(new) if new else nullcontext(engine) as engine:
            own = bench._replace(tokenizer=engine.tokenizer)
            tables[label] = answer_rows(engine, rows, own, progress=report, **sampling)
        seconds = round(time.perf_counter() - start_time, 1)
        about = {"model": base, "adapter": adapter and str(adapter), "seconds": seconds}
        facts[label] = about | {"engine": engine.name}
    tables = with_accuracy(tables, rewards)
    about = {"samples": samples, "seed": seed, "max_completion_length": max_completion_length}
    return Evaluation(tables, {"models": facts, **build(tables, rewards, about)})


def options(config: "RunConfig") -> dict[str, Any]:
    """Return the rewards and settings of a run as arguments of `evaluate`."""
    return {
        "reward_funcs": load_rewards(config.rewards),
        "samples": config.evaluate.samples,
        "max_completion_length": config.grpo.max_completion_length,
        "batch_size": config.evaluate.eval_batch_size,
        "load_in_4bit": config.model.load_in_4bit,
        "seed": config.seed,
        "chat_template_kwargs": config.grpo.chat_template_kwargs,
        "environment": environments.of(config),
    }


def _rewards(
    reward_funcs: Any, weights: Sequence[float] | None, correct: str, rows: list[dict[str, Any]]
) -> RewardSet:
    """Return the rewards as a set, with the name of the one that decides what is right."""
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    weights = [1.0] * len(funcs) if weights is None else list(weights)
    if len(weights) != len(funcs):
        raise ValueError(f"reward_weights = {weights}: give one for each of {len(funcs)} rewards")
    names = names_of(funcs)
    if correct and correct not in names:
        raise ValueError(f"correct = {correct!r}: give the name of a reward: {', '.join(names)}")
    correct = correct or right_reward(funcs, rows, weights) or names[0]
    return reward_set(list(zip(funcs, weights, strict=True)), correct=correct)


def _parts(model: Model) -> tuple[str, Path | None, Engine | None]:
    """Return base, adapter and, for a loaded model, its engine; raise if a path does not exist."""
    base, adapter = model if isinstance(model, tuple) else (model, None)
    if adapter is None and not isinstance(base, str | Path):
        raise ValueError(f"{type(base).__name__} alone cannot be asked: give (model, tokenizer)")
    if adapter is None and Path(base, ADAPTER_CONFIG).is_file():
        raise ValueError(f"{base} is an adapter: give (base, {str(base)!r})")
    if not isinstance(adapter, str | Path | None):
        return base.name_or_path, None, policy_of(base, adapter).engine
    find_model(str(base))
    if adapter is not None:
        trained_base(str(base), Path(adapter))
    return str(base), adapter and Path(adapter), None


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
        weighted total), decoding, and format (the first format reward); for episodes also turns,
        the number of turns with calls.
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
