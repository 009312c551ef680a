"""Measure how often a policy is right on a few prompts, to decide whether GRPO can start."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grpo_nb.models import Policy, Progress, Sample
from grpo_nb.models.template import with_completion
from grpo_nb.reward_lab import Bench
from grpo_nb.reward_lab.base_model import MOSTLY
from grpo_nb.reward_lab.table import Row, passed
from grpo_nb.rewards.prompts import Message
from grpo_nb.stats import pass_at_k

if TYPE_CHECKING:
    from grpo_nb.runs.config import RunConfig

PROMPTS, SAMPLES = 16, 8  # prompts, and completions of each
MARK = 0.3  # pass@8 from which GRPO finds enough right answers to reinforce
PASS = f"pass@{SAMPLES}"


def measure(
    policy: Policy,
    rows: Sequence[Row],
    bench: Bench,
    config: "RunConfig",
    progress: Progress | None = None,
) -> dict[str, float]:
    """Measure the policy on these prompts, with completions sampled as in training.

    Returns:
        right (share of the completions), pass@8, zero-advantage (share of the groups), distinct
        (share of distinct completions in a group) and entropy (of the first completion of each
        prompt) [nats per token].
    """
    groups = policy.generate(
        [row["prompt"] for row in rows],
        max_completion_length=config.grpo.max_completion_length,
        temperature=config.grpo.temperature,
        num_generations=SAMPLES,
        seed=config.seed,
        batch_size=config.step_completions,
        progress=progress,
    )
    texts_P_G = [[sample.text for sample in group] for group in groups]
    table = bench.table(rows, texts_P_G)
    right_P_G = passed(table, bench.preset).reshape(len(rows), SAMPLES)
    return {
        "right": float(right_P_G.mean()),
        PASS: float(pass_at_k(right_P_G, SAMPLES).mean()),
        "zero-advantage": float(1 - table["signal"].mean()),
        "distinct": sum(len(set(texts)) for texts in texts_P_G) / (SAMPLES * len(rows)),
        "entropy": entropy(policy, [row["prompt"] for row in rows], [group[0] for group in groups]),
    }


def entropy(policy: Policy, prompts: Sequence[list[Message]], samples: Sequence[Sample]) -> float:
    """Return the policy's mean entropy over the tokens of these completions [nats per token]."""
    import torch

    total, tokens = 0.0, 0
    for prompt, sample in zip(prompts, samples, strict=True):
        inputs = with_completion(policy.tokenizer, prompt, sample.ids)
        inputs = {name: tensor.to(policy.model.device) for name, tensor in inputs.items()}
        start = inputs["input_ids"].shape[1] - len(sample.ids)
        with torch.no_grad():
            logits = policy.model(**inputs).logits[0, start - 1 : -1].float()
        total += float(torch.distributions.Categorical(logits=logits).entropy().sum())
        tokens += len(sample.ids)
    return total / max(1, tokens)


def suffices(figures: dict[str, Any], mark: float = MARK) -> bool:
    """Return whether GRPO can start: high pass@8, and zero advantage in at most half the groups."""
    return figures[PASS] >= mark and figures["zero-advantage"] <= MOSTLY
