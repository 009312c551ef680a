"""Compare models on held-out rows, prompt by prompt, with intervals: the tool for any notebook.

evaluate({"base": base, "trained": (base, "outputs/checkpoint-250")}, held_out, reward_funcs)
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_nb.evaluation.answering import Candidate, compare_models
from grpo_nb.evaluation.report import Evaluation
from grpo_nb.models import Progress, policy_of
from grpo_nb.reward_lab.check import right_reward
from grpo_nb.reward_lab.scoring import chats, names_of
from grpo_nb.reward_lab.table import Bench, Conditions
from grpo_nb.rewards.sets import RewardSet, reward_set

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
    rewards = _rewards(reward_funcs, reward_weights, correct, rows)
    pairs = [model for model in models.values() if isinstance(model, tuple)]
    bases = {str(base) for base, adapter in pairs if isinstance(adapter, str | Path)}
    return compare_models(
        [_candidate(*each, bases if load_in_4bit else ()) for each in models.items()],
        rows,
        lambda tokenizer: Bench(rewards, Conditions(max_completion_length), tokenizer),
        samples=samples,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )


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


def _candidate(label: str, model: Model, in_4bit: Collection[str]) -> Candidate:
    """Return a model as a candidate; `in_4bit` names the models that are loaded in 4 bit."""
    base, adapter = model if isinstance(model, tuple) else (model, None)
    if adapter is not None and not isinstance(adapter, str | Path):
        return Candidate(label, policy_of(base, adapter))  # a model and its tokenizer
    quantization = "4bit" if str(base) in in_4bit else "16bit"
    return Candidate(label, base, adapter and Path(adapter), quantization)
