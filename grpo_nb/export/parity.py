"""The parity gate: is the merged model the policy that was trained?"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grpo_nb.export.adapter import Delta
from grpo_nb.models import Sample, TransformersEngine
from grpo_nb.models.chat import hub_errors, render
from grpo_nb.reward_lab import Bench
from grpo_nb.rewards.prompts import Message

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Pass marks: mean KL a token [nats] at most, share of greedy tokens that differ at most. The
# dequantised merge differs by rounding alone; the other is another policy, bounded as such.
MARKS = {"merged_16bit": (1e-3, 0.005), "merged_16bit_original_base": (3e-2, 0.05)}
# How far apart two roundings of the same weights are depends on prompts, dtype and adapter, so it
# is measured. Sound merges were 0.5 to 2.3 times as far from their adapter as that in bf16, and
# merges into another base 7 to 300 times, on prompts like the training's and unlike them.
ROUNDINGS = 4
FEW_TOKENS = 3  # that differ prove nothing
KEPT_NUMBERS = 2**28  # log-probabilities held while the noise is measured: 1 GiB


class Row(NamedTuple):
    """A prompt with the adapter's greedy completion, as ids; both models read it."""

    ids: "Tensor"
    written: int


def behaviour(
    tuned: "PreTrainedModel",
    merged: "PreTrainedModel",
    bench: Bench,
    rows: Sequence[dict],
    max_completion_length: int,
    batch_size: int,
    changed: Collection[str] = (),
) -> dict[str, Any]:
    """What adapter-on-base and merged model make of the same held-out prompts.

    Token by token both see the adapter's own greedy completion so far: one differing token
    counts once, and does not make all that follow it differ.

    Args:
        tuned: Base and adapter, as trained.
        merged: The merged model, read back from disk; of no more use afterwards.
        bench: Rewards and tokenizer.
        rows: Held-out rows.
        max_completion_length: Of the greedy completions [tokens].
        batch_size: Prompts answered at a time.
        changed: Names of the merged weights.

    Returns:
        prompts, tokens, kl (mean a token, adapter to merged) [nats], logprob_gap (largest, of
        the completions' tokens) [nats], token_agreement, text_agreement (whole completions),
        reward {adapter, merged, difference}, means of the weighted total, and noise {kl,
        token_agreement} of the merged model against another rounding of its weights.
    """
    prompts = [row["prompt"] for row in rows]
    answers = {
        name: [
            group[0]
            for group in TransformersEngine(model, bench.tokenizer).generate(
                prompts, max_completion_length=max_completion_length, batch_size=batch_size
            )
        ]
        for name, model in {"adapter": tuned, "merged": merged}.items()
    }
    texts = {name: [sample.text for sample in samples] for name, samples in answers.items()}
    seen = [
        _row(bench.tokenizer, prompt, sample)
        for prompt, sample in zip(prompts, answers["adapter"], strict=True)
    ]
    gaps = [_gaps(_logs(tuned, row), _logs(merged, row), row) for row in seen]
    kl, gap, same = np.concatenate(gaps, axis=1)
    reward = {
        name: float(np.nanmean(bench.totals(bench.score(rows, given))))
        for name, given in texts.items()
    }
    equal = [a == b for a, b in zip(texts["adapter"], texts["merged"], strict=True)]
    return {
        "prompts": len(rows),
        "tokens": len(kl),
        "kl": float(kl.mean()),
        "logprob_gap": float(gap.max()),
        "token_agreement": float(same.mean()),
        "text_agreement": float(np.mean(equal)),
        "reward": reward | {"difference": reward["merged"] - reward["adapter"]},
        "noise": _noise(merged, seen, changed),
    }


def _noise(model: "PreTrainedModel", rows: Sequence[Row], changed: Collection[str]) -> dict:
    """What another rounding of the merged weights to 16 bit changes; the model keeps it.

    That the same adapter gives in another batch or with other padding says less: it is 1 to 100
    times closer to itself than to any 16-bit merge.
    """
    few = KEPT_NUMBERS // model.config.vocab_size
    held = [row for i, row in enumerate(rows) if sum(r.written for r in rows[: i + 1]) <= few]
    held = held or list(rows[:1])
    before = [_logs(model, row) for row in held]
    _round_otherwise(model, changed)
    gaps = [_gaps(old, _logs(model, row), row) for old, row in zip(before, held, strict=True)]
    kl, _, same = np.concatenate(gaps, axis=1)
    return {"kl": float(kl.mean()), "token_agreement": float(same.mean())}


def _round_otherwise(model: "PreTrainedModel", changed: Collection[str]) -> None:
    """Move each of the weights by up to half a step of bf16, in which merged files are kept."""
    import torch

    generator = torch.Generator(model.device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in changed:
                moved = torch.rand(weight.shape, generator=generator, device=weight.device)
                weight.copy_(weight.float() * (1 + torch.finfo(torch.bfloat16).eps * (moved - 0.5)))


def _row(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message], sample: Sample) -> Row:
    import torch

    text = sample.text + ("" if sample.truncated else tokenizer.eos_token)
    before, written = (
        torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"], dtype=torch.long)
        for part in (render(tokenizer, prompt), text)
    )
    return Row(torch.cat([before, written])[None], len(written))


def _logs(model: "PreTrainedModel", row: Row) -> "Tensor":
    """Log-probabilities at each place of the completion, [tokens, vocabulary]."""
    import torch

    with torch.inference_mode():
        ids = row.ids.to(model.device)
        logits = model(input_ids=ids, logits_to_keep=row.written + 1).logits
        return logits[0, -row.written - 1 : -1].float().log_softmax(-1).cpu()


def _gaps(left: "Tensor", right: "Tensor", row: Row) -> np.ndarray:
    """KL, gap of the log-probability and agreement of the likeliest token, [3, tokens]."""
    import torch

    written = row.ids[0, -row.written :, None]
    kl = (left.exp() * (left - right)).sum(-1)
    gap = (left - right).gather(-1, written)[:, 0].abs()
    same = left.argmax(-1) == right.argmax(-1)
    return torch.stack([kl, gap, same.float()]).numpy()


def differing_layers(
    base: "PreTrainedModel", deltas: Mapping[str, Delta], folder: Path
) -> tuple[int, list[str]]:
    """(tensors compared, names of those that the files in `folder` do not hold as expected).

    Args:
        base: The model that the adapter was added to, in 16 bit.
        deltas: What was added, by the name of the weight.
    """
    import torch
    from safetensors import safe_open

    with hub_errors(str(folder)):
        files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    held = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    expected, differ = dict(base.named_parameters()), []  # tied weights once, as in the files
    for name, weight in expected.items():
        with torch.no_grad():
            tensor = deltas[name].added_to(weight) if name in deltas else weight
        if name not in held or not torch.equal(held[name].get_tensor(name), tensor.cpu()):
            differ.append(name)
    return len(expected), differ


def marks(mode: str, seen: dict[str, Any]) -> dict[str, float]:
    """KL at most, and greedy token agreement at least: the mode's, or what rounding alone does."""
    most, differ = MARKS[mode]
    noise = seen["noise"]
    differ = max(differ, ROUNDINGS * (1 - noise["token_agreement"])) + FEW_TOKENS / seen["tokens"]
    return {"kl": max(most, ROUNDINGS * noise["kl"]), "token_agreement": 1 - differ}


def verdict(mode: str, seen: dict[str, Any], differ: Sequence[str]) -> list[str]:
    """What speaks against the merge; empty where it passes."""
    needed, faults = marks(mode, seen), []
    if differ:
        faults.append(
            f"not base + adapter in {len(differ)} layers: {', '.join(differ[:5])}: the base is "
            "not the one trained on, or the files were written wrongly"
        )
    if not seen["kl"] <= needed["kl"]:  # a NaN fails
        faults.append(f"KL {seen['kl']:.2g} > {needed['kl']:.2g}")
    if not seen["token_agreement"] >= needed["token_agreement"]:
        agreed, least = seen["token_agreement"], needed["token_agreement"]
        faults.append(f"greedy token agreement {agreed:.2%} < {least:.1%}")
    if faults and not differ:
        faults.append(
            f"every layer is base + adapter, so that the merge is sound; another rounding of it "
            f"has KL {seen['noise']['kl']:.2g}. What is left is how the adapter's own model "
            "computes: other 4-bit settings, or another dtype, than the merge assumes"
        )
    return faults


def summary(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    if "kl" not in report:
        return f"{report['mode']}: the weights themselves were trained, and are copied in 16 bit"
    reward, layers = report["reward"], report["layers"]
    return (
        f"{report['mode']} {'passes' if report['passed'] else 'FAILS'} the parity gate on "
        f"{report['prompts']} prompts, {report['tokens']} tokens\n"
        f"KL adapter to merged     {report['kl']:.2g} a token, {report['noise']['kl']:.2g} "
        "between two roundings\n"
        f"largest log-prob. gap    {report['logprob_gap']:.2g}\n"
        f"greedy tokens equal      {report['token_agreement']:.2%}; whole texts "
        f"{report['text_agreement']:.1%}\n"
        f"reward                   {reward['adapter']:.3f} → {reward['merged']:.3f}\n"
        f"layers not as expected   {len(layers['differ'])} of {layers['compared']}"
    )
