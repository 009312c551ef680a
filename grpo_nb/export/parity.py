"""Test whether the merged model is the policy that was trained: the parity gate.

`weights` compares every weight of the merged files with the base's plus the adapter's change. This
detects a merge error of any magnitude and shows its kind. The KL divergence on prompts measures
the loss from rounding to 16 bits, and reveals faults outside the weights, such as a
different config.json. docs/figures.md has the measurements behind the limits.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.checks import Check
from grpo_nb.files import read_yaml
from grpo_nb.models import engine_of
from grpo_nb.models.template import with_completion
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# A merge rounds by less than one step of bf16, and a policy in fp16 or fp32 adds half a step of its
# own. The absolute tolerance is for fp16 numbers close to 0.
RELATIVE, ABSOLUTE = 2 * 2**-7, 2**-23
BEYOND = 1e-4  # the share of a tensor that may exceed the tolerance; 0 in sound merges
# A tensor lacks too much of the adapter's change if it lacks more than this share, and more than
# this many standard errors: sound merges had at most 4.3 of them, omitted layers 45 or more.
LOST, SURE = 0.01, 8
KL = 0.05  # mean per token [nats]; sound merges computed in bf16 had up to 0.007
# The evidence and the fix for each kind of fault.
FAULTS = read_yaml(Path(__file__).with_name("faults.yaml"))
OTHERWISE = "the weights are right: compare the merged folder's config.json with the base's"


def weights(tuned: "PreTrainedModel", merged: "PreTrainedModel") -> dict[str, Any]:
    """Compare each weight of the merged model with the base's plus the adapter's change.

    Args:
        tuned: The base with the adapter, as trained.
        merged: The merged model, read back from disk.

    Returns:
        weights (how many tensors there are), adapted (how many of them the adapter changes), kept
        (the share of the adapter's change that is in the merged model; 1 is right), and faults
        ({kind: {name of a tensor: share}}, with the kinds of FAULTS). For the kind "adapter" the
        share is defined as for kept; for the others it is a relative distance.
    """
    import torch
    from peft.tuners.lora import LoraLayer
    from peft.utils.integrations import dequantize_bnb_weight

    layers, parameters = {}, dict(merged.named_parameters())
    for path, module in tuned.named_modules():
        if isinstance(module, LoraLayer):
            layers[plain_name(f"{path}.{getattr(module, 'parameter_name', 'weight')}")] = module
    faults: dict[str, dict[str, float]] = {kind: {} for kind in FAULTS}
    count, errors, changes = 0, 0.0, 0.0
    with torch.no_grad():
        for path, weight in tuned.named_parameters():
            if ".lora_" in path:
                continue
            name, count = plain_name(path), count + 1
            base = dequantize_bnb_weight(weight) if hasattr(weight, "quant_state") else weight
            change = layers[name].get_delta_weight("default") if name in layers else None
            kind, figure, error, square = _tensor(base, change, parameters[name])
            errors, changes = errors + error, changes + square
            if kind:
                faults[kind][name] = figure
    share = 1 + errors / changes  # an adapter of zeros was refused before the merge
    return {"weights": count, "adapted": len(layers), "kept": share, "faults": faults}


def plain_name(path: str) -> str:
    """Return the name that a weight has in a model without an adapter."""
    return path.removeprefix("base_model.model.").replace(".base_layer", "")


def _tensor(
    base: "Tensor", change: "Tensor | None", merged: "Tensor"
) -> tuple[str, float, float, float]:
    """Compare a merged tensor with the base's tensor plus the adapter's change, if there is one.

    Returns:
        The kind of the tensor's fault or "", its relative error (for "adapter": the share kept),
        and two sums, from which `weights` computes `kept`: error times change, and change squared.
    """
    # Without a change, the weights keep their dtype: an embedding in fp32 would take gigabytes.
    right = base if change is None else base.float() + change.float()
    error = merged - right
    tolerance = RELATIVE * right.abs().maximum(base.abs()) + ABSOLUTE
    near = int((error.abs() <= tolerance).count_nonzero())  # NaN is not counted
    far = near < (1 - BEYOND) * error.numel()
    distance = float(error.norm() / base.norm())
    if change is None:
        return "unadapted" if far else "", distance, 0.0, 0.0
    products, square = (error * change).double(), float(change.double().square().sum())
    total, noise = float(products.sum()), float(products.norm())
    lost = abs(total) > LOST * square and abs(total) > SURE * noise
    if lost or (far and distance < RELATIVE):
        return "adapter", 1 + total / (square or 1), total, square
    return "base" if far else "", distance, total, square


def compare(
    tuned: "PreTrainedModel",
    merged: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    max_completion_length: int,
) -> dict[str, Any]:
    """Compare the adapter on its base with the merged model, in weights and on held-out prompts.

    Both models score each token of the adapter's greedy completion, so that one differing token
    counts once and does not affect the tokens after it.

    Args:
        tuned: The base with the adapter, as trained.
        merged: The merged model, read back from disk.
        tokenizer: The tokenizer of both.
        prompts: Held-out prompts.
        max_completion_length: Length at which completions are cut [tokens].

    Returns:
        The figures of `weights`, and prompts, tokens, kl (mean per token, adapter to merged)
        [nats], kl_base (adapter to base) [nats], token_agreement (adapter and merged).
    """
    import torch

    engine = engine_of(tuned, tokenizer)
    answers = engine.generate(prompts, max_completion_length=max_completion_length)
    distances = []  # [tokens, 3] for each prompt
    for prompt, [sample] in zip(prompts, answers, strict=True):
        inputs, tokens = with_completion(tokenizer, prompt, sample.ids), len(sample.ids)
        policy, files = (log_probs(model, inputs, tokens) for model in (tuned, merged))
        with tuned.disable_adapter():
            base = log_probs(tuned, inputs, tokens)
        same = (policy.argmax(-1) == files.argmax(-1)).float()
        distances.append(torch.stack([_kl(policy, files), _kl(policy, base), same], dim=1))
    kl, kl_base, agreement = torch.cat(distances).double().mean(0).tolist()
    figures = {"prompts": len(prompts), "tokens": sum(map(len, distances))}
    figures |= {"kl": kl, "kl_base": kl_base, "token_agreement": agreement}
    return weights(tuned, merged) | figures


def log_probs(model: "PreTrainedModel", inputs: "dict[str, Tensor]", tokens: int) -> "Tensor":
    """Return the log-probabilities at the completion's tokens, [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        logits = model(**inputs, logits_to_keep=tokens + 1).logits
        return logits[0, -tokens - 1 : -1].float().log_softmax(-1).cpu()


def _kl(left: "Tensor", right: "Tensor") -> "Tensor":
    return (left.exp() * (left - right)).sum(-1)


def verdict(figures: Mapping[str, Any]) -> Check:
    """Return the check "merge".

    Args:
        figures: The result of `compare`; empty after full fine-tuning.
    """
    if not figures:
        return Check("merge", "ok", "every weight was trained, and is copied in 16 bit")
    faults = {kind: tensors for kind, tensors in figures["faults"].items() if tensors}
    parts = []
    for kind, tensors in faults.items():
        name, share = next(iter(tensors.items()))
        text = FAULTS[kind]["evidence"].format(share=f"{share:z.0%}", name=name)
        parts.append(f"{len(tensors)} {text}")
    sound = f"each of {figures['weights']} weights is the base's plus the adapter's change, rounded"
    evidence = (
        f"{'; '.join(parts) or sound}; {figures['kept']:.1%} of the change is in the files; KL "
        f"adapter to merged {figures['kl']:.2g} per token (at most {KL}; to the base "
        f"{figures['kl_base']:.2g}), greedy tokens equal {figures['token_agreement']:.2%}, on "
        f"{figures['prompts']} prompts, {figures['tokens']} tokens"
    )
    if not faults and figures["kl"] <= KL:  # False for NaN
        return Check("merge", "ok", evidence)
    fix = FAULTS[next(iter(faults))]["fix"] if faults else OTHERWISE
    return Check("merge", "stop", evidence, f"{fix}; then merge again")
