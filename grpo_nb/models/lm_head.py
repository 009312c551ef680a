"""TRL's fused LM head in plain torch: its own is a Triton kernel, which needs a GPU.

Removed once TRL offers it: TRL 1.16 computes without Triton on a CPU.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
CHUNK_LOGITS = 2**22  # held at once: 16 MB in fp32


class ChunkedLogProbs:
    """Takes the place of `trl.trainer.utils._ChunkedLogProbFunction`, of which TRL calls `apply`.

    Rows of tokens go through the head in chunks; the backward computes each chunk's logits
    again, so that those of all tokens never exist together.
    """

    @staticmethod
    def apply(
        hidden: "torch.Tensor",
        weight: "torch.Tensor",
        bias: "torch.Tensor | None",
        targets: "torch.Tensor",
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple["torch.Tensor | None", ...]:
        """Log-probabilities, then each of OUTPUTS or None: all [tokens].

        Args:
            hidden: [tokens, hidden].
            weight: [vocabulary, hidden].
            bias: [vocabulary].
            targets: [tokens].
            temperature: The logits are divided by it, last.
            chunk_size: Of the vocabulary, in TRL's kernel; not used.
            softcap: Of the scaled logits.
            logit_scale: Of the head's product.
            outputs: Which of OUTPUTS are wanted.
        """
        import torch
        from torch.utils.checkpoint import checkpoint

        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        head = (weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
        how = (temperature, softcap, logit_scale, outputs)
        again = {"use_reentrant": False, "preserve_rng_state": False}
        chunks = [
            checkpoint(_log_probs, *chunk, *head, *how, **again)
            for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
        ]
        columns = zip(*chunks, strict=True)
        return tuple(None if column[0] is None else torch.cat(column) for column in columns)


def _log_probs(hidden, targets, weight, bias, temperature, softcap, logit_scale, outputs):
    """One chunk of `ChunkedLogProbs.apply`. Gradients: log-probabilities and entropy."""
    import torch

    logits = torch.nn.functional.linear(hidden, weight, bias).float() * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    log_p = logits.log_softmax(-1)
    fixed = log_p.detach()
    return (
        log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1),
        -(log_p.exp() * log_p).sum(-1) if "entropy" in outputs else None,
        (2 * fixed).logsumexp(-1) if "log_sum_sq_probs" in outputs else None,
        logits.detach().mean(-1) if "mean_logits" in outputs else None,
        fixed.argmax(-1) == targets if "is_top1" in outputs else None,
    )


def install() -> None:
    """Let this process' TRL compute its fused LM head in torch."""
    from trl.trainer import utils

    utils._ChunkedLogProbFunction = ChunkedLogProbs
