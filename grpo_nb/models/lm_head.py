"""Provide TRL's fused LM head in plain torch, because TRL's Triton kernel needs a GPU.

TRL 1.16 needs no Triton on a CPU. With that version, this file can be removed.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CHUNK_LOGITS = 2**22  # logits in memory at once: 16 MB in fp32


class ChunkedLogProbs:
    """Replace `trl.trainer.utils._ChunkedLogProbFunction`, whose `apply` TRL calls.

    The head is applied to chunks of tokens, and again in the backward pass, so that the logits of
    all tokens are never in memory at once.
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
        head = (weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
        again = {"use_reentrant": False, "preserve_rng_state": False}
        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        chunks = [
            checkpoint(_log_probs, *chunk, *head, temperature, softcap, scale, **again)
            for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        log_probs, entropy, is_top1 = map(torch.cat, zip(*chunks, strict=True))
        entropy = entropy if "entropy" in outputs else None
        return log_probs, entropy, None, None, is_top1 if "is_top1" in outputs else None


def _log_probs(hidden, targets, weight, bias, temperature, softcap, scale):
    """Compute one chunk of `ChunkedLogProbs.apply`."""
    import torch

    logits = torch.nn.functional.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = (logits / temperature).log_softmax(-1)
    targets = targets.unsqueeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    is_top1 = log_p.detach().argmax(-1, keepdim=True) == targets
    return log_p.gather(-1, targets)[:, 0], entropy, is_top1[:, 0]


def install() -> None:
    """Make TRL compute its fused LM head in plain torch, in this process."""
    from trl.trainer import utils

    utils._ChunkedLogProbFunction = ChunkedLogProbs
