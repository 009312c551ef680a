"""Provide the fast paths for a CPU, which halve the time of a step and change no result.

Completions are sampled by `models.dense`. The update runs each prompt once for its group: all
groups are packed into one row [prompt | c1 | … | c8 | next prompt | …], and only attention copies a
prompt to its completions. A group of eight thus runs one copy of its prompt instead of eight, and
no padding. With policy.backend = 'transformers', a GPU shares prompts in the same way.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from grpo_nb.models import Policy, cuda_available
from grpo_nb.models.dense import dense_lacks, full_attention
from grpo_nb.models.hub import has_vision
from grpo_nb.training.stock import distorted

if TYPE_CHECKING:
    import torch


def sampling_lacks(trainer: Any) -> str:
    """Return an unmet condition for sampling completions with `models.dense`; "" if all are met."""
    args, model = trainer.args, trainer.model
    trainable = [name for name, weight in model.named_parameters() if weight.requires_grad]
    needs = {
        "policy.rollouts = 'auto'": trainer.stage.config.policy.rollouts == "auto",
        "transformers to generate, not vLLM": not trainer.use_vllm,
        "temperature as the only setting of sampling": not (
            distorted(args) or args.generation_kwargs or args.cache_implementation
        ),
        "model.full_finetuning = False": all("lora_" in name for name in trainable),
        "one process": trainer.accelerator.num_processes == 1,
    }
    return dense_lacks(model) or next((need for need, met in needs.items() if not met), "")


def paths(trainer: Any) -> str:
    """Say how completions and log-probabilities are computed, and what the faster paths need."""
    sampling = sampling_lacks(trainer)
    sharing = sharing_lacks(trainer.policy, trainer.stage.config.policy.share_prompts)
    how = "completions by the dense engine"
    if sampling:
        how = f"completions by {'vLLM' if trainer.use_vllm else 'the policy itself'}"
        how += "" if cuda_available() else f" (the dense engine needs {sampling})"
    how += "; the update runs a prompt "
    how += f"for each completion (sharing needs {sharing})" if sharing else "once for its group"
    return how


def log_probabilities(
    trainer: Any,
    plain: Callable[..., Any],
    model: Any,
    input_ids: "torch.Tensor",
    attention_mask: "torch.Tensor",
    logits_to_keep: int,
    batch_size: int | None = None,
    compute_entropy: bool = False,
    *args: Any,  # the seventh: TRL's compute_aux_loss, or Unsloth's compute_efficient
    **others: Any,
) -> Any:
    """Compute the results of TRL's `_get_per_token_logps_and_entropies`, but run each prompt once.

    Args:
        trainer: The trainer, whose autocast setting is used.
        plain: TRL's method, which is called instead if a further argument is set, such as images.

    The other arguments are those of TRL's method.
    """
    import torch

    if args or any(value is not None and value is not False for value in others.values()):
        first = (model, input_ids, attention_mask, logits_to_keep, batch_size, compute_entropy)
        return plain(*first, *args, **others)
    parts = []
    size = batch_size or len(input_ids)
    for start in range(0, len(input_ids), size):
        part = (input_ids[start : start + size], attention_mask[start : start + size])
        with trainer.accelerator.autocast():
            parts.append(_packed_log_p(model, *pack(*part, logits_to_keep), compute_entropy))
    log_p, entropies = zip(*parts, strict=True)
    return torch.cat(log_p), torch.cat(entropies) if compute_entropy else None, None


def sharing_lacks(policy: Policy, wanted: bool = True) -> str:
    """Return an unmet condition for sharing prompts in the update; "" if all are met.

    Args:
        policy: The policy; its attention must accept the mask of `pack`.
        wanted: The setting `policy.share_prompts`.
    """
    model = policy.model
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    parameters = inspect.signature(type(base).forward).parameters
    needs = {
        "policy.share_prompts = true": wanted,
        "policy.backend = 'transformers' on a GPU": policy.backend == "transformers"
        or not cuda_available(),
        "a model that reads text alone": not has_vision(base.config),
        "attention by sdpa": base.config._attn_implementation == "sdpa",
        "full attention in every layer": full_attention(base),
        "attention by transformers' interface": base._supports_attention_backend,
        "a model that takes position_ids": "position_ids" in parameters,
    }
    return next((need for need, met in needs.items() if not met), "")


def pack(
    input_ids: "torch.Tensor", attention_mask: "torch.Tensor", completion_width: int
) -> tuple[dict[str, "torch.Tensor"], "torch.Tensor"]:
    """Pack all rows into one, with each distinct prompt once and its completions after it.

    Args:
        input_ids: [rows, prompt width + completion width].
        attention_mask: 1 for tokens, 0 for padding; same shape.
        completion_width: How many columns at the end are completions.

    Returns:
        The model's inputs, [1, tokens], and the index of each completion token's log-probability in
        a row of `tokens - 1` values, [rows, completion width]; for padding, the index is one past
        the end. The inputs contain each prompt without its last token, followed, for each of its
        completions, by that last token and the completion's tokens. Positions count within each
        sequence. Labels are the tokens of completions, and -100 elsewhere. The mask is the layout
        that `attend` reads.
    """
    import torch
    from torch.nn.utils.rnn import pad_sequence

    groups: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
    for number, (ids, mask) in enumerate(
        zip(input_ids.tolist(), attention_mask.bool().tolist(), strict=True)
    ):
        split = len(ids) - completion_width
        prompt = tuple(token for token, keep in zip(ids[:split], mask, strict=False) if keep)
        completion = [t for t, keep in zip(ids[split:], mask[split:], strict=True) if keep]
        groups.setdefault(prompt, []).append((number, completion))
    tokens, positions, labels = [], [], []
    sources, outputs = [], []
    place = torch.full((len(input_ids), completion_width), -1)
    for prompt, group in groups.items():
        shared, new = torch.arange(len(prompt) - 1) + len(tokens), True
        tokens += prompt[:-1]
        positions += range(len(prompt) - 1)
        labels += [-100] * (len(prompt) - 1)
        for number, completion in group:
            start = len(tokens)
            tokens += [prompt[-1], *completion]
            labels += [-100, *completion]
            positions += range(len(prompt) - 1, len(prompt) + len(completion))
            place[number, : len(completion)] = torch.arange(start, len(tokens) - 1)
            sources.append(torch.cat([shared, torch.arange(start, len(tokens))]))
            outputs.append((sources[-1] >= start) | new)
            new = False
    place[place < 0] = len(tokens) - 1
    layout = [pad_sequence(part, batch_first=True).long() for part in (sources, outputs)]
    inputs = {"input_ids": tokens, "position_ids": positions, "labels": labels}
    inputs = {name: torch.tensor([one]).to(input_ids) for name, one in inputs.items()}
    inputs["attention_mask"] = torch.stack(layout)[:, None].to(input_ids)
    return inputs, place.to(input_ids)


def attend(
    module: Any,
    query: "torch.Tensor",
    key: "torch.Tensor",
    value: "torch.Tensor",
    attention_mask: "torch.Tensor | None",
    **options: Any,
) -> tuple["torch.Tensor", None]:
    """Compute attention with sdpa, separately for each sequence if the mask is `pack`'s layout.

    Args:
        attention_mask: [2, 1, sequences, width], integers: for each token of a prompt and its
            completion, first its position in the packed row, then whether its output is returned.
            Padding is at the end, where no token attends to it.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward as plain

    if attention_mask is None or attention_mask.dtype != torch.long:
        return plain(module, query, key, value, attention_mask, **options)
    places, returned = attention_mask[:, 0]
    # Attention on a CPU is faster in fp32, and a prompt's gradients are summed in fp32. Indexing
    # with brackets would sum them in an order that depends on the threads.
    dtype = torch.float32 if query.device.type == "cpu" else query.dtype
    rows = (
        x[0].transpose(0, 1).to(dtype).index_select(0, places.flatten())
        for x in (query, key, value)
    )
    parts = [x.unflatten(0, places.shape).transpose(1, 2) for x in rows]
    with torch.autocast(query.device.type, enabled=False):
        mixed, _ = plain(module, *parts, None, **options | {"is_causal": True})
    row = mixed.flatten(0, 1).index_select(0, returned.flatten().nonzero()[:, 0])
    return row[None].to(query.dtype), None


def _packed_log_p(
    model: Any, inputs: dict[str, Any], place: "torch.Tensor", compute_entropy: bool
) -> tuple[Any, Any]:
    """Return log-probabilities and entropies, [rows, completion width], 0 for padding."""
    import torch
    from transformers import AttentionInterface

    AttentionInterface.register("sdpa", attend)
    outputs = model(**inputs, fused_lm_head=True)

    def of_rows(values: "torch.Tensor") -> "torch.Tensor":
        return torch.nn.functional.pad(values.flatten(), (0, 1))[place]

    entropies = of_rows(outputs.entropy) if compute_entropy else None
    return of_rows(outputs.log_probs), entropies
