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

# Pass marks: mean KL a token [nats] at most, share of greedy tokens that differ at most. The
# dequantised merge differs by rounding alone.
KL, DIFFERENT = 1e-3, 0.005
# How far apart two roundings of the same weights are depends on prompts, dtype and adapter, so it
# is measured. Sound merges were 0.5 to 2.3 times as far from their adapter as that in bf16, and
# merges into another base 7 to 300 times, on prompts like the training's and unlike them.
ROUNDINGS = 4
FEW_TOKENS = 3  # that differ prove nothing
TIE = 0.1  # nats between two tokens that rounding, or another expert, may turn round
KEPT_NUMBERS = 2**28  # log-probabilities held while the noise is measured: 1 GiB


def behaviour(
    tuned: "PreTrainedModel",
    merged: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    sampling: Mapping[str, Any],
    changed: Collection[str],
) -> dict[str, Any]:
    """What adapter-on-base and merged model make of the same held-out prompts.

    Token by token both see the adapter's own greedy completion so far: one differing token
    counts once, and does not make all that follow it differ.

    Args:
        tuned: Base and adapter, as trained.
        merged: The merged model, read back from disk; of no more use afterwards.
        tokenizer: Of both.
        prompts: Held-out prompts.
        sampling: Arguments of `Engine.generate` for the completions.
        changed: Names of the merged weights.

    Returns:
        prompts, tokens, kl (mean a token, adapter to merged) [nats], token_agreement, gap (how far
        apart the adapter holds two tokens that differ, mean) [nats], and noise {the same three} of
        the merged model against another rounding of its weights. That
        the same adapter gives in another batch or with other padding says less: it is 1 to 100
        times closer to itself than to any 16-bit merge.
    """
    import torch

    answers = TransformersEngine(tuned, tokenizer).generate(prompts, **sampling)
    room, seen, held = KEPT_NUMBERS // merged.config.get_text_config().vocab_size, [], []
    for prompt, [sample] in zip(prompts, answers, strict=True):
        before = tokenizer(render(tokenizer, prompt), add_special_tokens=False)["input_ids"]
        ids, written = torch.tensor([before + list(sample.ids)]), len(sample.ids)
        theirs = _logs(merged, ids, written)
        seen.append(_apart(_logs(tuned, ids, written), theirs))
        if not held or room >= written:
            held.append((ids, written, theirs))
            room -= written
    _round_otherwise(merged, changed)
    noise = [_apart(before, _logs(merged, ids, written)) for ids, written, before in held]
    tokens = sum(len(of_prompt) for of_prompt in seen)
    return {"prompts": len(prompts), "tokens": tokens, **_mean(seen), "noise": _mean(noise)}


def _logs(model: "PreTrainedModel", ids: "Tensor", written: int) -> "Tensor":
    """Log-probabilities at each place of the completion, [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=ids.to(model.device), logits_to_keep=written + 1).logits
        return logits[0, -written - 1 : -1].float().log_softmax(-1).cpu()


def _apart(left: "Tensor", right: "Tensor") -> "Tensor":
    """KL, agreement of the likeliest token, and what `left` gives between the two, [tokens, 3]."""
    import torch

    kl, (best, token) = (left.exp() * (left - right)).sum(-1), left.max(-1)
    other = right.argmax(-1)
    gap = best - left.gather(-1, other[:, None])[:, 0]
    return torch.stack([kl, (token == other).float(), gap], dim=1)


def _mean(of_prompts: Sequence["Tensor"]) -> dict[str, float]:
    import torch

    kl, agreement, gap = torch.cat(of_prompts).double().mean(0).tolist()
    return {"kl": kl, "token_agreement": agreement, "gap": gap / (1 - agreement or 1)}


def _round_otherwise(model: "PreTrainedModel", changed: Collection[str]) -> None:
    """Move each of the weights by up to half a step of bf16, in which merged files are kept."""
    import torch

    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in changed:
                moved = torch.rand(weight.shape, generator=generator, device=weight.device)
                weight.copy_(weight.float() * (1 + torch.finfo(torch.bfloat16).eps * (moved - 0.5)))


def verdict(seen: Mapping[str, Any]) -> Check:
    """The check "merge".

    Args:
        seen: As `behaviour` gives it; empty where every weight was trained.
    """
    if not seen:
        return Check("merge", "ok", "every weight was trained, and is copied in 16 bit")
    if not seen["tokens"]:
        fix = "the policy writes nothing but special tokens: train it, or take another base"
        return Check("merge", "stop", "no completion holds text to compare", fix)
    noise = seen["noise"]
    most = max(KL, ROUNDINGS * noise["kl"])
    differ = max(DIFFERENT, ROUNDINGS * (1 - noise["token_agreement"]))
    least = 1 - differ - FEW_TOKENS / seen["tokens"]
    ties = seen["token_agreement"] < 1 and seen["gap"] < TIE
    same_weights = seen["kl"] <= most  # a NaN is none
    evidence = (
        f"KL adapter to merged {seen['kl']:.2g} a token (at most {most:.2g}; {noise['kl']:.2g} "
        f"between two roundings), greedy tokens equal {seen['token_agreement']:.2%} (at least "
        f"{least:.1%}), on {seen['prompts']} prompts, {seen['tokens']} tokens"
    )
    if ties:
        evidence += f"; the others were ties to the adapter, {seen['gap']:.2g} nats apart"
    if same_weights and (ties or seen["token_agreement"] >= least):
        return Check("merge", "ok", evidence)
    if same_weights:
        fix = (
            "the weights are those that were trained (see the KL), and single tokens are far "
            "apart: judge on more prompts, export.parity_prompts"
        )
        return Check("merge", "stop", evidence, fix)
    fix = (
        "the merged model is another policy than the adapter on its base: see that "
        "model.model_path is the base that was trained on, and that its 4-bit settings and dtype "
        "are those of the training; then run 04_merge_and_infer again"
    )
    return Check("merge", "stop", evidence, fix)
