"""Log-probabilities of a group with its prompt run once: one row [prompt | c1 | … | c8] a prompt.

A completion sees the prompt and itself, and its positions go on from the prompt's: what is
computed is the same, without seven of eight prompts and without the padding of short completions.
"""

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.models import Policy, cuda_available

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


class Packed(NamedTuple):
    """Rows of a pass, packed: [trees, width], and where each completion's tokens went.

    tokens: Ids: of the prompt but its last; then, for each completion, that last one and its own.
    positions: Of each in its own sequence.
    labels: A completion's tokens; -100 elsewhere.
    seen: Which column a column attends to, [trees, 1, width, width].
    place: Of each completion token's log-probability in the flattened [trees, width - 1]; of
        padding one past its end, [rows, completion width].
    """

    tokens: "torch.Tensor"
    positions: "torch.Tensor"
    labels: "torch.Tensor"
    seen: "torch.Tensor"
    place: "torch.Tensor"


class SharedPrompts:
    """Of a GRPOTrainer: runs each prompt once a pass, where `share_prompts` and it saves work."""

    share_prompts: bool = False

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: "torch.Tensor",
        attention_mask: "torch.Tensor",
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        *args: Any,  # the seventh is compute_aux_loss of TRL's, compute_efficient of Unsloth's
        **others: Any,
    ) -> Any:
        import torch

        log_p = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        plain = not any(value is not None and value is not False for value in others.values())
        if not self.share_prompts or args or not plain:
            first = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
            return log_p(*first, *args, **others)
        found = []
        size = batch_size or len(input_ids)
        for start in range(0, len(input_ids), size):
            part = (input_ids[start : start + size], attention_mask[start : start + size])
            packed = pack(*part, logits_to_keep)
            # Not `model`: where processes share the training it is wrapped, and has no config.
            if _work(packed.tokens, self.model) < _work(part[0], self.model):
                with self.accelerator.autocast():
                    found.append(_packed_log_p(model, packed, compute_entropy))
            else:
                found.append(log_p(model, *part, logits_to_keep, compute_entropy=compute_entropy))
        log_p, entropies, _ = zip(*found, strict=True)
        return torch.cat(log_p), torch.cat(entropies) if compute_entropy else None, None


def can_share(policy: Policy) -> bool:
    """Whether the model takes a mask that says for each token what it sees.

    On a GPU Unsloth's own forward does not.
    """
    model = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return (
        (policy.backend == "transformers" or not cuda_available())
        and base.config._attn_implementation == "sdpa"
        and full_attention(base)
        and "position_ids" in inspect.signature(type(base).forward).parameters
    )


def full_attention(model: "PreTrainedModel") -> bool:
    """Whether every layer attends to all tokens before: no window, chunks or recurrent state."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    full = set(kinds) == {"full_attention"} if kinds else not getattr(config, "sliding_window", 0)
    return full and not getattr(model, "_is_stateful", False)


def _work(tokens: "torch.Tensor", model: Any) -> int:
    """Of a forward over [rows, width], in units of attention to one token: see performance.md."""
    hidden = model.config.get_text_config().hidden_size
    rows, width = tokens.shape
    return rows * width * (6 * hidden + width)


def pack(
    input_ids: "torch.Tensor", attention_mask: "torch.Tensor", completion_width: int
) -> Packed:
    """One row for each distinct prompt, with its completions one after the other.

    Args:
        input_ids: [rows, prompt width + completion width].
        attention_mask: 1 for what is no padding; same shape.
        completion_width: Columns at the end that are completions.
    """
    import torch

    trees: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for number, (ids, kept) in enumerate(
        zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)
    ):
        split = len(ids) - completion_width
        prompt = tuple(token for token, keep in zip(ids[:split], kept, strict=False) if keep)
        completion = [t for t, keep in zip(ids[split:], kept[split:], strict=True) if keep]
        trees.setdefault(prompt, []).append((number, completion))
    width = max(len(p) - 1 + sum(1 + len(c) for _, c in group) for p, group in trees.items())
    shape, device = (len(trees), width), input_ids.device
    tokens, positions, branch = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    labels = torch.full(shape, -100)
    place = torch.full((len(input_ids), completion_width), len(trees) * (width - 1))
    for row, (prompt, group) in enumerate(trees.items()):
        end = len(prompt) - 1
        tokens[row, :end], positions[row, :end] = torch.tensor(prompt[:-1]), torch.arange(end)
        branch[row, end:] = -1
        for number, (index, completion) in enumerate(group, 1):
            start, end = end, end + 1 + len(completion)
            tokens[row, start:end] = torch.tensor([prompt[-1], *completion])
            labels[row, start + 1 : end] = tokens[row, start + 1 : end]
            positions[row, start:end] = torch.arange(end - start) + len(prompt) - 1
            branch[row, start:end] = number
            place[index, : len(completion)] = torch.arange(start, end - 1) + row * (width - 1)
    seen = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen = (seen & torch.ones(width, width, dtype=torch.bool).tril())[:, None]
    return Packed(*(x.to(device) for x in (tokens, positions, labels, seen, place)))


def _packed_log_p(model: Any, packed: Packed, compute_entropy: bool) -> tuple[Any, Any, None]:
    """Log-probabilities and entropies, [rows, completion width], 0 for padding; no aux loss."""
    import torch

    outputs = model(
        input_ids=packed.tokens,
        attention_mask=packed.seen,
        position_ids=packed.positions,
        labels=packed.labels,
        fused_lm_head=True,
    )

    def of_rows(values: "torch.Tensor") -> "torch.Tensor":
        return torch.nn.functional.pad(values.flatten(), (0, 1))[packed.place]

    entropies = of_rows(outputs.entropy) if compute_entropy else None
    return of_rows(outputs.log_probs), entropies, None
