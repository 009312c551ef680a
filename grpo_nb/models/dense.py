"""Sample fast on a CPU: use the model's own weights, and compute the adapter separately.

transformers' `generate` copies all keys and values for each token, runs a prompt once for each of
its completions, and keeps computing finished rows until the last row ends. Here, each distinct
prompt is run once, a prefix that all prompts share is run only once for all of them, finished rows
leave the batch, keys and values are updated in place, and attention heads that share keys are
computed together.
The weights keep the model's precision, so the results differ from those of `generate` by rounding
only.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora import LoraLayer
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_nb.models.engine import Sampling, TransformersEngine
from grpo_nb.models.hub import has_vision, quiet
from grpo_nb.models.weights import cuda_available

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTENTION = "grpo_nb_grouped"
PACKED_ROWS = 16  # batch size for which oneDNN packs the weights; other sizes work, too
PACKED_BYTES = 2**30  # maximum size of the packed copy of the linear layers
LEAVE = 1 / 8  # share of finished rows at which they are removed from the batch


class DenseEngine(TransformersEngine):
    """Sample on a CPU from a model that is not quantized, with its LoRA adapter if it has one.

    Args:
        model: A model for which `dense_lacks` returns ""; it may be trained between calls.
        tokenizer: The model's tokenizer.
        around: A function that returns the context manager to sample in (see `TransformersEngine`).
    """

    name = "dense"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._dense = DenseModel(self.model)

    def close(self) -> None:
        self._dense = None
        super().close()

    def _batch(
        self, prompts: Sequence[Sequence[int]], asked: Sampling, chats: Any = ()
    ) -> list[list[int]]:
        return sample(
            self._dense.renew(asked.adapter),
            prompts,
            max_completion_length=asked.max_completion_length,
            stops=self.stops,
            pad=self.tokenizer.pad_token_id,
            temperature=asked.temperature,
        )


def dense_lacks(model: "PreTrainedModel") -> str:
    """Return the first requirement of `DenseEngine` that this model does not meet, or ""."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    whole = not any(hasattr(weight, "device_mesh") for weight in base.parameters())
    needs = {
        "a machine without a GPU": not cuda_available(),
        "weights that are not sharded": whole,
        "weights that are not quantized": not getattr(base, "is_quantized", False),
        "a decoder of text with full attention in every layer": (
            getattr(base, "_supports_sdpa", False)
            and not has_vision(base.config)
            and full_attention(base)
        ),
        "no adapter but LoRA": bool(layers) == hasattr(model, "peft_config"),
        "an adapter on linear layers alone, without variants such as DoRA": all(
            isinstance(layer.base_layer, torch.nn.Linear)
            and "default" in layer.lora_A
            and not layer.lora_variant
            and not any(layer.lora_bias.values())
            for layer in layers
        ),
    }
    return next((need for need, met in needs.items() if not met), "")


def full_attention(model: "PreTrainedModel") -> bool:
    """Return whether every layer attends to all earlier tokens, without window, chunks or state."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    full = set(kinds) == {"full_attention"} if kinds else not getattr(config, "sliding_window", 0)
    return full and not getattr(model, "_is_stateful", False)


class DenseModel:
    """Hold a second model that shares a model's weights but samples faster.

    Args:
        source: The model. If it is a peft model, its adapter is computed separately.
    """

    def __init__(self, source: "PreTrainedModel") -> None:
        base = source.get_base_model() if hasattr(source, "get_base_model") else source
        weights = {
            name.replace(".base_layer.", "."): weight
            for name, weight in base.state_dict().items()
            if ".lora_" not in name
        }
        AttentionInterface.register(ATTENTION, _attend)
        options = {"dtype": base.dtype, "attn_implementation": ATTENTION}
        with quiet():
            config = type(base.config).from_dict(base.config.to_dict())
            self.model = type(base).from_pretrained(
                None, config=config, state_dict=weights, **options
            )
        self.model.eval().requires_grad_(False)
        frozen = not any(w.requires_grad for n, w in base.named_parameters() if ".lora_" not in n)
        for name, linear in _packable(self.model).items() if frozen else ():
            self.model.set_submodule(name, PackedLinear(linear))
        layers = {name: m for name, m in base.named_modules() if isinstance(m, LoraLayer)}
        self.beside = [
            LoraBeside(layer, self.model.get_submodule(k)) for k, layer in layers.items()
        ]
        for name, module in zip(layers, self.beside, strict=True):
            self.model.set_submodule(name, module)

    def renew(self, adapter: bool = True) -> "PreTrainedModel":
        """Return the model with the current adapter, or without it if `adapter` is false."""
        for module in self.beside:
            module.renew(adapter)
        return self.model


def _packable(model: "PreTrainedModel") -> dict[str, torch.nn.Linear]:
    """Return the linear layers if oneDNN can pack them (in bf16, up to PACKED_BYTES), else {}."""
    linears = {n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    fits = sum(m.weight.nbytes for m in linears.values()) <= PACKED_BYTES
    in_bf16 = all(m.weight.dtype == torch.bfloat16 for m in linears.values())
    able = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return linears if fits and in_bf16 and able else {}


class PackedLinear(torch.nn.Module):
    """Compute a linear layer from a copy of its weights in oneDNN's packed layout.

    Without this copy, oneDNN would pack the weights again for each product.

    Args:
        linear: A layer whose weights do not change.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.packed = [torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        [packed] = self.packed  # no buffer, because it has no storage that could be copied or moved
        return torch.ops.mkldnn._linear_pointwise(hidden, packed, self.bias, "none", [], "")


class LoraBeside(torch.nn.Module):
    """Add the output of a copied adapter to that of its linear layer, in the weights' precision.

    If the adapter were merged into 16-bit weights, rounding would lose small updates.

    Args:
        layer: The LoRA layer in the source model.
        linear: The corresponding layer in `DenseModel.model`.
    """

    def __init__(self, layer: LoraLayer, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.layer, self.linear = [layer], linear  # in a list, `layer` does not become a submodule

    def renew(self, adapter: bool) -> None:
        """Copy the adapter's current weights, with a scale of 0 if `adapter` is false."""
        [layer] = self.layer
        a, b = (part["default"].weight.detach() for part in (layer.lora_A, layer.lora_B))
        scale = layer.scaling["default"] if adapter else 0.0
        dtype = self.linear.weight.dtype
        self.a, self.b = a.to(dtype).t(), (scale * b).to(dtype).t()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.flatten(0, -2)
        summed = self.linear(rows)
        summed.addmm_(rows @ self.a, self.b)
        return summed.view(*hidden.shape[:-1], -1)


def _attend(
    module: Any, query: torch.Tensor, key: Any, value: Any, attention_mask: Any, **options: Any
) -> tuple[torch.Tensor, None]:
    """Return the output of torch's attention, [rows, tokens, heads, size], and None.

    For a single token, query heads that share keys are computed as several queries of one head.
    """
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
    """Hold the keys and values of one layer of transformers' cache, and update them in place.

    transformers' DynamicLayer copies all keys and values for each token.

    Args:
        layer: A filled DynamicLayer.
        index: The rows to take from it, [rows].
        more: The number of further tokens to reserve room for.
    """

    is_sliding, is_initialized = False, True

    def __init__(self, layer: Any, index: torch.Tensor, more: int) -> None:
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

    def batch_select_indices(self, index: torch.Tensor) -> None:
        self.keys, self.values = self.keys[index], self.values[index]


@torch.inference_mode()
def sample(
    model: "PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    *,
    max_completion_length: int,
    stops: Sequence[int],
    pad: int,
    temperature: float = 1.0,
) -> list[list[int]]:
    """Sample a completion for each prompt with torch's random state, and return its token ids.

    Args:
        model: `DenseModel.model`.
        prompts: Token ids; equal prompts are run once.
        max_completion_length: Longest completion [tokens].
        stops: Ids of the tokens that end a completion and are included in it.
        pad: The token id for left padding.
        temperature: The sampling temperature; 0 is greedy.
    """
    logits, cache, tokens, mask, last = _prefill(model, prompts, max_completion_length, pad)
    width = tokens.shape[1] - max_completion_length
    lengths = torch.full((len(prompts),), max_completion_length)
    rows = torch.arange(len(prompts))
    ends = torch.tensor(stops, dtype=torch.long)
    alive = torch.ones_like(rows, dtype=torch.bool)
    for step in range(max_completion_length):
        token = draw(logits / temperature) if temperature else logits.argmax(-1)
        tokens[rows, width + step] = token
        ended = alive & torch.isin(token, ends)
        lengths[rows[ended]] = step + 1
        alive &= ~ended
        count = int(alive.sum())
        if not count or step + 1 == max_completion_length:
            break
        if count <= (1 - LEAVE) * len(rows):
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
    """Run each distinct prompt through the model once, and the prefix that all share only once.

    Returns:
        The logits of each prompt's next token, [rows, vocabulary]; the cache; token ids and mask,
        [rows, width + more]; and the position of each prompt's last token, [rows, 1].
    """
    distinct = {tuple(ids): number for number, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width, shared = max(map(len, distinct)), _shared(list(distinct))
    tokens = torch.full((len(distinct), width + more), pad)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for number, ids in enumerate(distinct):
        gap = width - len(ids)
        mask[number, shared : shared + gap] = False
        tokens[number, :width][mask[number, :width]] = torch.tensor(ids)
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    square = torch.ones(width, width, dtype=torch.bool)
    # A padding position attends to itself, because a fully masked row would give NaN.
    attended = (square.tril() & mask[:, None, None, :width]) | square.diag().diag()
    cache = DynamicCache(config=model.config)
    for rows, begin, end in ((1, 0, shared), (len(distinct), shared, width)):
        if begin == end:
            continue
        logits = model(
            input_ids=tokens[:rows, begin:end],
            attention_mask=attended[:rows, :, begin:end, :end],
            position_ids=positions[:rows, begin:end],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.tensor([end - begin - 1]),  # with 1, torch would copy the head
        ).logits[:, -1]
        if rows < len(distinct):
            cache.batch_repeat_interleave(len(distinct))
    index = torch.tensor([distinct[tuple(ids)] for ids in prompts])
    cache.layers = [FixedLayer(layer, index, more) for layer in cache.layers]
    return logits[index], cache, tokens[index], mask[index], positions[index, -1:]


def _shared(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share; each keeps at least one of its own.

    The result is 0 if there is only one prompt.
    """
    if len(prompts) == 1:
        return 0
    columns = zip(*prompts, strict=False)
    same = sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, columns))
    return min(same, min(map(len, prompts)) - 1)


def draw(logits: torch.Tensor) -> torch.Tensor:
    """Draw a token for each row of logits.

    One random number per row is looked up in the cumulative distribution, whereas
    `torch.multinomial` draws a number for each token of the vocabulary.
    """
    ends = logits.float().softmax(-1).cumsum(-1, dtype=torch.float64)
    point = torch.rand(len(logits), 1, dtype=torch.float64) * ends[:, -1:]
    token = torch.searchsorted(ends, point, right=True)
    return token[:, 0].clamp(max=logits.shape[1] - 1)
