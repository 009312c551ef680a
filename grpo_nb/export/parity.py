"""The parity gate: is the merged model the policy that was trained?"""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_nb.models import TransformersEngine
from grpo_nb.models.chat import render
from grpo_nb.rewards.prompts import Message
from grpo_nb.runs import Check

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Always allowed: a mean KL per token [nats], and a share of differing greedy tokens. A merge into
# the dequantised base differs by rounding only.
KL, DIFFERENT = 1e-3, 0.005
# The distance between two roundings of the same weights depends on prompts, dtype and adapter, so
# it is measured. In bf16 sound merges were 0.5 to 2.3 times that distance from their adapter, and
# merges into another base 7 to 300 times, on prompts like those of the training and on others.
ROUNDINGS = 4
FEW_TOKENS = 3  # so few differing tokens prove nothing
TIE = 0.1  # [nats] between two tokens whose order rounding, or another expert, may reverse
KEPT_NUMBERS = 2**28  # log-probabilities kept while the noise is measured: 1 GiB
TOKENS_APART = (
    "the KL shows that the weights are the trained ones, but some tokens are far apart: test on "
    "more prompts (export.parity_prompts)"
)
OTHER_WEIGHTS = (
    "the merged model is not the policy that was trained: check that model.model_path is the base "
    "of the training, with the same 4-bit settings and dtype; then run 04_merge_and_infer again"
)


def behaviour(
    tuned: "PreTrainedModel",
    merged: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    sampling: Mapping[str, Any],
    changed: Collection[str],
) -> dict[str, Any]:
    """Compare the adapter on its base with the merged model on held-out prompts.

    Both models score each token of the adapter's greedy completion, so that one differing token
    counts once and does not change those after it.

    Args:
        tuned: The base with the adapter, as trained.
        merged: The merged model, read back from disk; its weights are changed by this function.
        tokenizer: The tokenizer of both.
        prompts: Held-out prompts.
        sampling: Arguments of `Engine.generate` for the completions.
        changed: The names of the merged weights.

    Returns:
        prompts, tokens, kl (mean per token, adapter to merged) [nats], token_agreement, gap (the
        adapter's mean difference between two tokens that differ) [nats], and noise: the last three
        between the merged model and another rounding of its weights. The noise of other batches or
        padding would be too strict a measure: the adapter's distance from itself in another batch
        is 1 to 100 times smaller than from any 16-bit merge.
    """
    import torch

    answers = TransformersEngine(tuned, tokenizer).generate(prompts, **sampling)
    room, distances, kept = KEPT_NUMBERS // merged.config.get_text_config().vocab_size, [], []
    for prompt, [sample] in zip(prompts, answers, strict=True):
        before = tokenizer(render(tokenizer, prompt), add_special_tokens=False)["input_ids"]
        ids, tokens = torch.tensor([before + list(sample.ids)]), len(sample.ids)
        log_probs = _log_probs(merged, ids, tokens)
        distances.append(_distance(_log_probs(tuned, ids, tokens), log_probs))
        if not kept or room >= tokens:
            kept.append((ids, tokens, log_probs))
            room -= tokens
    _round_otherwise(merged, changed)
    noise = [_distance(logs, _log_probs(merged, ids, tokens)) for ids, tokens, logs in kept]
    total = sum(map(len, distances))
    return {"prompts": len(prompts), "tokens": total, **_mean(distances), "noise": _mean(noise)}


def _log_probs(model: "PreTrainedModel", ids: "Tensor", tokens: int) -> "Tensor":
    """Return log-probabilities at the last tokens, the completion's, [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=ids.to(model.device), logits_to_keep=tokens + 1).logits
        return logits[0, -tokens - 1 : -1].float().log_softmax(-1).cpu()


def _distance(left: "Tensor", right: "Tensor") -> "Tensor":
    """Return KL, agreement of the likeliest tokens, and their gap in `left`, [tokens, 3]."""
    import torch

    kl, (best, token) = (left.exp() * (left - right)).sum(-1), left.max(-1)
    other = right.argmax(-1)
    gap = best - left.gather(-1, other[:, None])[:, 0]
    return torch.stack([kl, (token == other).float(), gap], dim=1)


def _mean(distances: Sequence["Tensor"]) -> dict[str, float]:
    import torch

    kl, agreement, gap = torch.cat(distances).double().mean(0).tolist()
    return {"kl": kl, "token_agreement": agreement, "gap": gap / (1 - agreement or 1)}


def _round_otherwise(model: "PreTrainedModel", changed: Collection[str]) -> None:
    """Change each merged weight by up to half a rounding step of bf16, the dtype of the files."""
    import torch

    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in changed:
                moved = torch.rand(weight.shape, generator=generator, device=weight.device)
                weight.copy_(weight.float() * (1 + torch.finfo(torch.bfloat16).eps * (moved - 0.5)))


def verdict(figures: Mapping[str, Any]) -> Check:
    """Return the check "merge".

    Args:
        figures: The result of `behaviour`; empty after full fine-tuning.
    """
    if not figures:
        return Check("merge", "ok", "every weight was trained, and is copied in 16 bit")
    if not figures["tokens"]:
        fix = "the policy writes only special tokens: train it, or use another base model"
        return Check("merge", "stop", "no completion holds text to compare", fix)
    noise = figures["noise"]
    highest_kl = max(KL, ROUNDINGS * noise["kl"])
    differ = max(DIFFERENT, ROUNDINGS * (1 - noise["token_agreement"]))
    least = 1 - differ - FEW_TOKENS / figures["tokens"]
    ties = figures["token_agreement"] < 1 and figures["gap"] < TIE
    same_weights = figures["kl"] <= highest_kl  # False for NaN
    evidence = (
        f"KL adapter to merged {figures['kl']:.2g} per token (at most {highest_kl:.2g}; "
        f"{noise['kl']:.2g} between two roundings), greedy tokens equal "
        f"{figures['token_agreement']:.2%} (at least {least:.1%}), on {figures['prompts']} "
        f"prompts, {figures['tokens']} tokens"
    )
    if ties:
        evidence += f"; the others were near ties for the adapter, {figures['gap']:.2g} nats apart"
    if same_weights and (ties or figures["token_agreement"] >= least):
        return Check("merge", "ok", evidence)
    return Check("merge", "stop", evidence, TOKENS_APART if same_weights else OTHER_WEIGHTS)
