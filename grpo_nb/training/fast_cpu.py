"""What makes a step on a CPU two and a half times as fast; without this module it is only slower.

Completions are sampled from a dense copy of the policy: a 4-bit policy dequantises every weight
for every token, and its LoRA layers run beside. The copy holds what both amount to as plain fp32
weights, renewed before each generation; the gradient comes from the policy as ever. Sampling runs
each distinct prompt once, rows that have ended leave the batch, keys and values lie in place, and
heads that share keys are one attention.

The update runs each prompt once for its group, as one row [prompt | c1 | … | c8]. A completion
sees the prompt and itself, and its positions go on from the prompt's: what is computed is the
same, without seven of eight prompts and without the padding of short completions.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from grpo_nb.models import Policy, cuda_available
from grpo_nb.training.arguments import distorted

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ATTENTION = "grpo_nb_grouped"
LEAVE = 1 / 8  # of the batch: so many ended rows are worth copying the others together


def _attend(
    module: Any, query: "torch.Tensor", key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple["torch.Tensor", None]:
    """Torch's attention; of one token the heads that share keys are its queries. [B, 1, H, D]."""
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    rows, heads, tokens, size = query.shape
    if tokens > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    mixed = torch.nn.functional.scaled_dot_product_attention(
        query.view(rows, key.shape[1], -1, size),
        key,
        value,
        attn_mask=attention_mask,
        scale=options.get("scaling"),
    )
    return mixed.reshape(rows, 1, heads, size), None


class FixedLayer:
    """A layer of transformers' cache that holds keys and values in one place.

    DynamicLayer copies them all for each token.

    Args:
        layer: A DynamicLayer, filled.
        index: Its rows to take, [rows].
        more: Tokens to make place for.
    """

    is_sliding, is_initialized = False, True

    def __init__(self, layer: Any, index: "torch.Tensor", more: int) -> None:
        import torch

        self.used = layer.keys.shape[-2]
        place = (0, 0, 0, more)
        self.keys = torch.nn.functional.pad(layer.keys[index], place)
        self.values = torch.nn.functional.pad(layer.values[index], place)

    def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        start, self.used = self.used, self.used + keys.shape[-2]
        self.keys[:, :, start : self.used] = keys
        self.values[:, :, start : self.used] = values
        return self.keys[:, :, : self.used], self.values[:, :, : self.used]

    def get_seq_length(self) -> int:
        return self.used

    def batch_select_indices(self, index: "torch.Tensor") -> None:
        self.keys, self.values = self.keys[index], self.values[index]


def sample(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    *,
    max_completion_length: int,
    stops: Sequence[int],
    pad: int,
    temperature: float = 1.0,
) -> list[list[int]]:
    """Token ids of a completion for each prompt, by torch's random state.

    Args:
        model: `DenseCopy.renewed`.
        prompts: Token ids; equal ones are run once.
        max_completion_length: Cut after this [tokens].
        stops: Ids that end a completion, and are its last.
        pad: Id for the places before a short prompt.
        temperature: The logits are divided by it; nearly 0 is greedy.
    """
    import torch

    logits, cache, tokens, mask, last = _prefill(model, prompts, max_completion_length, pad)
    width = tokens.shape[1] - max_completion_length
    lengths = torch.full((len(prompts),), max_completion_length)
    rows = torch.arange(len(prompts))
    ends = torch.tensor(stops, dtype=torch.long)
    alive = torch.ones_like(rows, dtype=torch.bool)
    for step in range(max_completion_length):
        token = draw(logits / temperature)
        tokens[rows, width + step] = token
        ended = alive & torch.isin(token, ends)
        lengths[rows[ended]] = step + 1
        alive &= ~ended
        left = int(alive.sum())
        if not left or step + 1 == max_completion_length:
            break
        if left <= (1 - LEAVE) * len(rows):
            cache.batch_select_indices(alive)
            rows, token, mask, last, alive = (x[alive] for x in (rows, token, mask, last, alive))
        last = last + 1
        logits = model(
            input_ids=token[:, None],
            attention_mask=mask[:, None, None, : width + step + 1],
            position_ids=last,
            past_key_values=cache,
        ).logits[:, -1]
    pairs = zip(tokens[:, width:].tolist(), lengths.tolist(), strict=True)
    return [ids[:length] for ids, length in pairs]


def _prefill(
    model: "PreTrainedModel", prompts: Sequence[Sequence[int]], more: int, pad: int
) -> tuple[Any, ...]:
    """Run each distinct prompt once.

    Returns:
        For each prompt: logits of its next token, [rows, vocabulary]; cache; token ids and mask
        with room for `more`, [rows, width + more]; position of its last token, [rows, 1].
    """
    import torch
    from transformers import DynamicCache

    distinct = {tuple(ids): number for number, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, distinct))
    tokens = torch.full((len(distinct), width + more), pad)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for number, ids in enumerate(distinct):
        tokens[number, width - len(ids) : width] = torch.tensor(ids)
        mask[number, : width - len(ids)] = False
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    square = torch.ones(width, width, dtype=torch.bool)
    # A place before a prompt sees itself: a row of nothing but masked ones would be NaN.
    seen = (square.tril() & mask[:, None, None, :width]) | square.diag().diag()
    cache = DynamicCache(config=model.config)
    logits = model(
        input_ids=tokens[:, :width],
        attention_mask=seen,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    ).logits[:, -1]
    index = torch.tensor([distinct[tuple(ids)] for ids in prompts])
    cache.layers = [FixedLayer(layer, index, more) for layer in cache.layers]
    return logits[index], cache, tokens[index], mask[index], positions[index, -1:]


def draw(logits: "torch.Tensor") -> "torch.Tensor":
    """A token for each row of logits.

    By the inverse of the distribution function: one random number a row, where
    `torch.multinomial` draws one for each token of the vocabulary.
    """
    import torch

    reached = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    chosen = torch.rand(len(logits), 1, dtype=torch.float64)
    token = torch.searchsorted(reached, chosen * reached[:, -1:], right=True)
    return token[:, 0].clamp(max=logits.shape[1] - 1)


def copy_lacks(trainer: Any) -> str:
    """What is missing to sample from a dense copy of the policy, or nothing."""
    from peft.tuners.lora import LoraLayer

    args, model = trainer.args, trainer.model
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    needs = {
        "a machine without a GPU": not cuda_available(),
        "policy.rollouts = 'auto'": trainer.stage.config.policy.rollouts == "auto",
        "transformers to generate, not vLLM": not trainer.use_vllm,
        "temperature as the only setting of sampling": not (
            distorted(args) or args.generation_kwargs or args.cache_implementation
        ),
        "policy.finetuning = 'lora'": bool(layers) and all("lora_" in name for name in trained),
        "LoRA without variants such as DoRA": not any(module.lora_variant for module in layers),
        "no adapter on experts": not any(hasattr(one, "parameter_name") for one in layers),
        "one process": trainer.accelerator.num_processes == 1,
        "a decoder of text with full attention in every layer": (
            not trainer._is_vlm and base._supports_sdpa and full_attention(base)
        ),
    }
    return next((need for need, met in needs.items() if not met), "")


class DenseCopy:
    """The policy's base with its LoRA merged in, without quantisation.

    Args:
        policy: A peft model; its base may be quantised.
    """

    def __init__(self, policy: "PreTrainedModel") -> None:
        import torch
        from peft.tuners.lora import LoraLayer
        from transformers import AttentionInterface

        base = policy.get_base_model()
        modules = dict(base.named_modules())
        plain = {k: v for k, v in base.config.to_dict().items() if k != "quantization_config"}
        AttentionInterface.register(ATTENTION, _attend)
        with torch.random.fork_rng():  # its first weights are drawn, and the training's are not
            how = {"dtype": torch.float32, "attn_implementation": ATTENTION}
            self.model = type(base)._from_config(type(base.config).from_dict(plain), **how)
        self.model.eval().requires_grad_(False)
        for name, weight in self.model.state_dict().items():
            weight.copy_(_dense(modules, name))
        layers = {name: m for name, m in modules.items() if isinstance(m, LoraLayer)}
        merged = [(layer, self.model.get_submodule(name)) for name, layer in layers.items()]
        self.merged = [(layer, dense.weight, dense.weight.clone()) for layer, dense in merged]

    def renewed(self) -> "PreTrainedModel":
        """The copy, with the adapter as it is now."""
        import torch

        for module, weight, base in self.merged:
            torch.add(base, module.get_delta_weight("default"), out=weight.data)
        return self.model

    def sample(self, trainer: Any, prompts: Sequence[Sequence[int]]) -> tuple[list, None]:
        """TRL's `_generate_single_turn` of text: token ids; None, as where transformers samples."""
        import torch

        with torch.no_grad():
            ids = sample(
                self.renewed(),
                prompts,
                max_completion_length=trainer.max_completion_length,
                stops=trainer.eos_token_ids,
                pad=trainer._tokenizer.pad_token_id,
                temperature=trainer.temperature,
            )
        return ids, None


def _dense(modules: dict[str, Any], name: str) -> "torch.Tensor":
    """A weight of the base by its name, dequantised."""
    from peft.utils.integrations import dequantize_module_weight

    path, _, leaf = name.rpartition(".")
    module = getattr(modules[path], "base_layer", modules[path])
    return dequantize_module_weight(module) if leaf == "weight" else getattr(module, leaf)


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
