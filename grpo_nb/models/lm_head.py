"""Provide TRL's fused LM head in plain torch, because TRL's Triton kernel needs a GPU.

TRL 1.16 needs no Triton on a CPU. With that version, this file can be removed.
"""

import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from grpo_nb.models.weights import cuda_available

if TYPE_CHECKING:
    import torch

OUTPUTS = ("entropy", "is_top1")  # requested by the GRPO and SFT trainers besides log_probs
CHUNK_LOGITS = 2**22  # logits in memory at once: 16 MB in fp32


class ChunkedLogProbs:
    """Replace `trl.trainer.utils._ChunkedLogProbFunction`, whose `apply` TRL calls.

    The head is applied to chunks of tokens, so that the logits of all tokens are never in memory at
    once. If the head is frozen, the forward pass computes the gradient of each log-probability with
    respect to its hidden state; otherwise the backward pass computes each chunk's logits again.
    """

    @staticmethod
    def apply(
        hidden: "torch.Tensor",
        weight: "torch.Tensor",
        bias: "torch.Tensor | None",
        targets: "torch.Tensor",
        *how: Any,
    ) -> tuple["torch.Tensor | None", ...]:
        """Return (log-probabilities, entropy, None, None, is_top1), each [tokens] or None.

        Args:
            hidden: Hidden states, [tokens, hidden].
            weight: The weight of the head, [vocabulary, hidden].
            bias: The bias of the head, [vocabulary].
            targets: Target token ids, [tokens].
            how: TRL's further arguments: the temperature that divides the logits, the chunk size
                of TRL's kernel, softcap and scale of the logits, and the names of the outputs.
        """
        import torch
        from torch.utils.checkpoint import checkpoint

        temperature, _, softcap, scale, outputs = how
        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        frozen = softcap is None and not weight.requires_grad
        frozen = frozen and (bias is None or not bias.requires_grad)
        sloped = frozen and hidden.requires_grad and torch.is_grad_enabled()
        options = (sloped, "is_top1" in outputs)
        head = (weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
        again = {"use_reentrant": False, "preserve_rng_state": False}
        chunks = [
            checkpoint(_log_probs, *chunk, *head, temperature, softcap, scale, *options, **again)
            for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        log_probs, entropy, is_top1, slopes = map(torch.cat, zip(*chunks, strict=True))
        if sloped:  # the added term is 0, and its gradient is the slope
            log_probs = log_probs.detach() + ((hidden - hidden.detach()) * slopes).sum(-1)
        values = {"entropy": entropy, "is_top1": is_top1}
        entropy, is_top1 = (values[name] if name in outputs else None for name in OUTPUTS)
        return log_probs, entropy, None, None, is_top1


def _log_probs(hidden, targets, weight, bias, temperature, softcap, scale, sloped, top):
    """Compute one chunk of `ChunkedLogProbs.apply`; only the first two results have gradients."""
    import torch

    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    if scale != 1:
        logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature if temperature != 1 else logits).log_softmax(-1)
    p, targets = log_p.exp(), targets.unsqueeze(-1)
    target_log_p = log_p.gather(-1, targets)
    slopes = hidden.new_zeros(len(hidden), 0)
    if sloped:
        with torch.no_grad():
            rest = p.scatter(-1, targets, target_log_p.expm1()).to(weight.dtype)
            slopes = (rest @ weight).float() * (-scale / temperature)
    is_top1 = (log_p.detach().argmax(-1, keepdim=True) if top else targets) == targets
    return target_log_p[:, 0], -(p * log_p).sum(-1), is_top1[:, 0], slopes


def install() -> None:
    """Make TRL compute its fused LM head in plain torch, in this process."""
    from trl.trainer import utils

    utils._ChunkedLogProbFunction = ChunkedLogProbs


def install_where_needed() -> None:
    """Install it if TRL's own needs a GPU, and there is none; Unsloth has its own."""
    is_needed = version("trl").startswith("1.15.") and "unsloth" not in sys.modules
    if is_needed and not cuda_available():
        install()
