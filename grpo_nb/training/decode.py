"""Sampling from a decoder with as little work a token as there can be, with its own forward.

Each distinct prompt is run once, its keys and values are repeated for its group; rows that have
ended leave the batch; keys and values lie in place; heads that share keys are one attention.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ATTENTION = "grpo_nb_grouped"
LEAVE = 1 / 8  # of the batch: so many ended rows are worth copying the others together


def attention() -> str:
    """The name under which transformers knows our attention."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attend)
    return ATTENTION


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


class Room:
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
    processors: Any = None,
) -> tuple[list[list[int]], list[list[float]]]:
    """A completion for each prompt, by torch's random state.

    Args:
        model: A decoder of transformers with `attention()`, in evaluation.
        prompts: Token ids; equal ones are run once.
        max_completion_length: Cut after this [tokens].
        stops: Ids that end a completion, and are its last.
        pad: Id for the places before a short prompt.
        temperature: The logits are divided by it.
        processors: transformers' LogitsProcessorList, after the temperature.

    Returns:
        Token ids, and their log-probabilities at this temperature before the processors.
    """
    import torch

    device = model.device
    logits, cache, tokens, mask, last = _prefill(model, prompts, max_completion_length, pad)
    width = tokens.shape[1] - max_completion_length
    log_p = torch.zeros(len(prompts), max_completion_length, device=device)
    lengths = torch.full((len(prompts),), max_completion_length, device=device)
    rows, ends = (
        torch.arange(len(prompts), device=device),
        torch.tensor(stops, dtype=torch.long, device=device),
    )
    alive = torch.ones_like(rows, dtype=torch.bool)
    for step in range(max_completion_length):
        history = tokens[rows, : width + step] if processors else None
        token, log_p[rows, step] = draw(logits, temperature, processors, history)
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
    pairs = zip(tokens[:, width:].tolist(), log_p.tolist(), lengths.tolist(), strict=True)
    cut = [(ids[:length], values[:length]) for ids, values, length in pairs]
    return [ids for ids, _ in cut], [values for _, values in cut]


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

    device = model.device
    distinct = {tuple(ids): number for number, ids in enumerate(dict.fromkeys(map(tuple, prompts)))}
    width = max(map(len, distinct))
    tokens = torch.full((len(distinct), width + more), pad, device=device)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for number, ids in enumerate(distinct):
        tokens[number, width - len(ids) : width] = torch.tensor(ids, device=device)
        mask[number, : width - len(ids)] = False
    positions = (mask[:, :width].cumsum(1) - 1).clamp(min=0)
    square = torch.ones(width, width, dtype=torch.bool, device=device)
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
    index = torch.tensor([distinct[tuple(ids)] for ids in prompts], device=device)
    cache.layers = [Room(layer, index, more) for layer in cache.layers]
    return logits[index], cache, tokens[index], mask[index], positions[index, -1:]


def draw(
    logits: "torch.Tensor", temperature: float, processors: Any, history: Any
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """A token for each row of logits, and its log-probability before the processors.

    By the inverse of the distribution function: one random number a row, where
    `torch.multinomial` draws one for each token of the vocabulary.
    """
    import torch

    scaled = logits.float() / temperature
    log_p = scaled.log_softmax(-1)
    p = processors(history, scaled).softmax(-1) if processors else log_p.exp()
    reached = p.cumsum(-1, dtype=torch.float64)
    chosen = torch.rand(len(p), 1, dtype=torch.float64, device=p.device) * reached[:, -1:]
    token = torch.searchsorted(reached, chosen, right=True).clamp(max=p.shape[1] - 1)
    return token[:, 0], log_p.gather(-1, token)[:, 0]
