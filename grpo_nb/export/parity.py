"""The parity gate: is the merged model the policy that was trained?"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_nb.bench import Bench
from grpo_nb.chat import render
from grpo_nb.models import generate

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

# Pass marks: mean KL a token [nats] at most, greedy token agreement at least. The dequantised
# merge differs by bf16 rounding alone; the other two are other policies, and bounded as such.
MARKS = {
    "merged_16bit": (1e-3, 0.995),
    "merged_16bit_original_base": (3e-2, 0.95),
    "merged_4bit": (1e-1, 0.9),
}


def behaviour(
    tuned: "PreTrainedModel",
    merged: "PreTrainedModel",
    bench: Bench,
    rows: Sequence[dict],
    max_completion_length: int,
) -> dict[str, Any]:
    """What adapter-on-base and merged model make of the same held-out prompts.

    Token by token both see the adapter's own greedy completion so far: one differing token
    counts once, and does not make all that follow it differ.

    Args:
        tuned: Base and adapter, as trained.
        merged: The merged model, read back from disk.
        bench: Rewards and tokenizer.
        rows: Held-out rows.
        max_completion_length: Of the greedy completions [tokens].

    Returns:
        prompts, tokens, kl (mean a token, adapter to merged) [nats], logprob_gap (largest, of
        the completions' tokens) [nats], token_agreement, text_agreement (whole completions)
        and reward {adapter, merged, difference}, means of the weighted total.
    """
    prompts = [row["prompt"] for row in rows]
    answers = {
        name: [
            group[0]
            for group in generate(
                model, bench.tokenizer, prompts, max_completion_length=max_completion_length
            )
        ]
        for name, model in {"adapter": tuned, "merged": merged}.items()
    }
    texts = {name: [sample.text for sample in samples] for name, samples in answers.items()}
    tokens = [
        _token_gaps(tuned, merged, bench.tokenizer, render(bench.tokenizer, prompt), sample)
        for prompt, sample in zip(prompts, answers["adapter"], strict=True)
    ]
    kl, gap, same = np.concatenate(tokens, axis=1)
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
    }


def _token_gaps(
    tuned: "PreTrainedModel",
    merged: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str,
    sample: Any,
) -> np.ndarray:
    """KL, gap of the log-probability and agreement of the likeliest token, [3, tokens]."""
    import torch

    text = sample.text + ("" if sample.truncated else tokenizer.eos_token)
    before, written = (
        torch.tensor(tokenizer(part, add_special_tokens=False)["input_ids"], dtype=torch.long)
        for part in (prompt, text)
    )
    ids = torch.cat([before, written])[None].to(tuned.device)
    logs = []
    with torch.inference_mode():
        for model in (tuned, merged):
            logits = model(input_ids=ids, logits_to_keep=len(written) + 1).logits
            logs.append(logits[0, -len(written) - 1 : -1].float().log_softmax(-1).cpu())
    kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1)
    gap = (logs[0] - logs[1]).gather(-1, written[:, None])[:, 0].abs()
    same = logs[0].argmax(-1) == logs[1].argmax(-1)
    return torch.stack([kl, gap, same.float()]).numpy()


def differing_layers(expected: "Iterable[tuple[str, Tensor]]", folder: Path) -> tuple[int, list]:
    """(tensors compared, names of those that the files in `folder` do not hold as expected)."""
    import torch
    from safetensors import safe_open

    files = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
    held = {name: file for file in files for name in file.keys()}  # noqa: SIM118
    compared, differ = 0, []
    for name, tensor in expected:
        compared += 1
        if name not in held or not torch.equal(held[name].get_tensor(name), tensor):
            differ.append(name)
    return compared, differ


def verdict(mode: str, seen: dict[str, Any], differ: Sequence[str]) -> list[str]:
    """What speaks against the merge; empty where it passes."""
    most, least = MARKS[mode]
    faults = []
    if differ:
        faults.append(f"not base + adapter in {len(differ)} layers: {', '.join(differ[:5])}")
    if not seen["kl"] <= most:  # a NaN fails
        faults.append(f"KL {seen['kl']:.2g} > {most:g}")
    if not seen["token_agreement"] >= least:
        faults.append(f"greedy token agreement {seen['token_agreement']:.2%} < {least:.1%}")
    if faults and not differ:
        faults.append("every layer is base + adapter: the base is not the one trained on")
    return faults


def summary(report: dict[str, Any]) -> str:
    """The report in a few lines."""
    if "kl" not in report:
        return f"{report['mode']}: the weights themselves were trained, and are copied in 16 bit"
    reward, layers = report["reward"], report["layers"]
    return (
        f"{report['mode']} {'passes' if report['passed'] else 'FAILS'} the parity gate on "
        f"{report['prompts']} prompts, {report['tokens']} tokens\n"
        f"KL adapter to merged     {report['kl']:.2g} a token\n"
        f"largest log-prob. gap    {report['logprob_gap']:.2g}\n"
        f"greedy tokens equal      {report['token_agreement']:.2%}\n"
        f"reward                   {reward['adapter']:.3f} → {reward['merged']:.3f}\n"
        f"layers not as expected   {len(layers['differ'])} of {layers['compared']}"
    )
