"""What makes a step on a CPU twice as fast; without this module it is only slower.

Completions are sampled by `models.dense`. The update runs each prompt once for its group, as one
row [prompt | c1 | … | c8]. A completion sees the prompt and itself, and its positions go on from
the prompt's: what is computed is the same, without seven of eight prompts and without the padding
of short completions.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpo_nb.models import Policy, cuda_available
from grpo_nb.models.dense import dense_lacks, full_attention
from grpo_nb.training.arguments import distorted

if TYPE_CHECKING:
    import torch


def sampling_lacks(trainer: Any) -> str:
    """Return what is missing for `models.dense` to sample this training's completions, or ""."""
    args, model = trainer.args, trainer.model
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    needs = {
        "policy.rollouts = 'auto'": trainer.stage.config.policy.rollouts == "auto",
        "transformers to generate, not vLLM": not trainer.use_vllm,
        "temperature as the only setting of sampling": not (
            distorted(args) or args.generation_kwargs or args.cache_implementation
        ),
        "policy.finetuning = 'lora'": all("lora_" in name for name in trained),
        "one process": trainer.accelerator.num_processes == 1,
    }
    return dense_lacks(model) or next((need for need, met in needs.items() if not met), "")


def log_probabilities(
    trainer: Any,
    plain: Callable[..., Any],
    model: Any,
    input_ids: "torch.Tensor",
    attention_mask: "torch.Tensor",
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    *args: Any,  # the seventh is compute_aux_loss of TRL's, compute_efficient of Unsloth's
    **others: Any,
) -> Any:
    """TRL's `_get_per_token_logps_and_entropies`, with each prompt run once where that saves work.

    Args:
        trainer: Holds the policy; `model` may be wrapped, and has no config then.
        plain: TRL's method, which does what is not text alone.
    """
    import torch

    if args or any(value is not None and value is not False for value in others.values()):
        first = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
        return plain(*first, *args, **others)
    found = []
    size = batch_size or len(input_ids)
    for start in range(0, len(input_ids), size):
        part = (input_ids[start : start + size], attention_mask[start : start + size])
        inputs, place = pack(*part, logits_to_keep)
        if _work(inputs["input_ids"], trainer.model) < _work(part[0], trainer.model):
            with trainer.accelerator.autocast():
                found.append(_packed_log_p(model, inputs, place, compute_entropy))
        else:
            found.append(plain(model, *part, logits_to_keep, compute_entropy=compute_entropy))
    log_p, entropies, _ = zip(*found, strict=True)
    return torch.cat(log_p), torch.cat(entropies) if compute_entropy else None, None


def sharing_lacks(policy: Policy, asked: bool = True) -> str:
    """What is missing for prompts to be shared in the update, or nothing.

    It takes a mask that says for each token what it sees. `asked`: `policy.share_prompts`.
    """
    model = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    takes = inspect.signature(type(base).forward).parameters
    needs = {
        "policy.share_prompts = true": asked,
        "policy.backend = 'transformers' on a GPU": policy.backend == "transformers"
        or not cuda_available(),
        "attention by sdpa": base.config._attn_implementation == "sdpa",
        "full attention in every layer": full_attention(base),
        "a model that takes position_ids": "position_ids" in takes,
    }
    return next((need for need, met in needs.items() if not met), "")


def _work(tokens: "torch.Tensor", model: Any) -> int:
    """Of a forward over [rows, width], in units of attention to one token: see performance.md."""
    hidden = model.config.get_text_config().hidden_size
    rows, width = tokens.shape
    return rows * width * (6 * hidden + width)


def pack(
    input_ids: "torch.Tensor", attention_mask: "torch.Tensor", completion_width: int
) -> tuple[dict[str, "torch.Tensor"], "torch.Tensor"]:
    """One row (a tree) for each distinct prompt, with its completions one after the other.

    Args:
        input_ids: [rows, prompt width + completion width].
        attention_mask: 1 for what is no padding; same shape.
        completion_width: Columns at the end that are completions.

    Returns:
        The model's inputs, [trees, width]: the prompt but its last token, then for each completion
        that last one and its own; positions, of each in its own sequence; labels, a completion's
        tokens and -100 elsewhere; which column a column attends to, [trees, 1, width, width].
        And the place of each completion token's log-probability in the flattened [trees, width -
        1]; of padding one past its end, [rows, completion width].
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
    inputs = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    inputs["attention_mask"] = seen
    return {name: one.to(device) for name, one in inputs.items()}, place.to(device)


def _packed_log_p(
    model: Any, inputs: dict[str, Any], place: "torch.Tensor", compute_entropy: bool
) -> tuple[Any, Any, None]:
    """Log-probabilities and entropies, [rows, completion width], 0 for padding; no aux loss."""
    import torch

    outputs = model(**inputs, fused_lm_head=True)

    def of_rows(values: "torch.Tensor") -> "torch.Tensor":
        return torch.nn.functional.pad(values.flatten(), (0, 1))[place]

    entropies = of_rows(outputs.entropy) if compute_entropy else None
    return of_rows(outputs.log_probs), entropies, None
