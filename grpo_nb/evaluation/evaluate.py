"""Compare models on held-out rows, prompt by prompt, with intervals: the tool for any notebook.

evaluate({"base": base, "trained": (base, "outputs/checkpoint-250")}, held_out, reward_funcs)
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.evaluation.answering import answer_rows
from grpo_nb.evaluation.report import Evaluation, report_on, with_accuracy
from grpo_nb.models import (
    Engine,
    Progress,
    load_tokenizer,
    open_engine,
    part_of,
    policy_of,
    trained_base,
)
from grpo_nb.reward_lab.check import right_reward
from grpo_nb.reward_lab.scoring import chats, names_of
from grpo_nb.reward_lab.table import Bench, Conditions
from grpo_nb.rewards.sets import RewardSet, reward_set

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# A folder or hub name; a base and its adapter; or a loaded model and its tokenizer.
Model = str | Path | tuple[Any, Any]


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
    if not models:
        raise ValueError('models = {}: give at least one, such as {"base": "Qwen/Qwen3-1.7B"}')
    rewards, tables = _rewards(reward_funcs, reward_weights, correct, rows), {}
    each, conditions = len(rows) * (1 + samples), Conditions(max_completion_length)
    # What is missing is said before the first model is asked.
    parts = [_open(model, models.values(), load_in_4bit) for model in models.values()]
    for number, (label, (opened, tokenizer, stack)) in enumerate(zip(models, parts, strict=True)):
        with stack:
            tables[label] = answer_rows(
                opened,
                rows,
                Bench(rewards, conditions, tokenizer),
                samples=samples,
                seed=seed,
                batch_size=batch_size,
                progress=part_of(progress, number * each, len(models) * each, label),
            )
    about = {"samples": samples, "seed": seed, "max_completion_length": max_completion_length}
    tables = with_accuracy(tables, rewards)
    return Evaluation(tables, report_on(tables, rewards, about))


def _rewards(
    reward_funcs: Any, weights: Sequence[float] | None, correct: str, rows: list[dict[str, Any]]
) -> RewardSet:
    """Return the rewards as a set, with the name of the one that decides what is right."""
    funcs = [reward_funcs] if callable(reward_funcs) else list(reward_funcs)
    weights = [1.0] * len(funcs) if weights is None else list(weights)
    if len(weights) != len(funcs):
        raise ValueError(f"{len(weights)} weights for {len(funcs)} rewards: give one for each")
    names = names_of(funcs)
    if correct and correct not in names:
        raise ValueError(f"correct = {correct!r}: give the name of a reward: {', '.join(names)}")
    correct = correct or right_reward(funcs, rows, weights) or names[0]
    return reward_set(list(zip(funcs, weights, strict=True)), correct=correct)


def _open(
    model: Model, others: Any, load_in_4bit: bool
) -> tuple[Callable[[], Engine], "PreTrainedTokenizerBase", ExitStack]:
    """Return what opens a model's engine, its tokenizer, and what closes the engine."""
    stack = ExitStack()
    if isinstance(model, tuple) and not isinstance(model[1], str | Path):
        policy = policy_of(*model)
        return lambda: policy.engine, policy.tokenizer, stack
    base, adapter = model if isinstance(model, tuple) else (model, None)
    if adapter is not None:
        trained_base(str(base), Path(adapter))
    bases = {str(other[0]) for other in others if isinstance(other, tuple)}
    quantization = "4bit" if load_in_4bit and str(base) in bases else "16bit"

    def opened() -> Engine:
        folder = None if adapter is None else Path(adapter)
        engine = open_engine(str(base), adapter=folder, quantization=quantization)
        return stack.enter_context(closing(engine))

    return cache(opened), load_tokenizer(str(base)), stack
