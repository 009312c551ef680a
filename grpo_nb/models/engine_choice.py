"""Choose the engine that samples: vLLM on a GPU, `dense` on a CPU, else transformers."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.models.engine import Engine, TransformersEngine
from grpo_nb.models.hub import load_tokenizer
from grpo_nb.models.vllm import open_vllm, use_vllm
from grpo_nb.models.weights import load_checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def engine_of(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    around: Callable[[], AbstractContextManager] = nullcontext,
) -> TransformersEngine:
    """Return the fastest engine for a loaded model; the arguments are `TransformersEngine`'s."""
    from grpo_nb.models.dense import DenseEngine, dense_lacks

    kind = TransformersEngine if dense_lacks(model) else DenseEngine
    return kind(model, tokenizer, around)


def open_engine(
    model_path: str,
    *,
    adapter: Path | None,
    quantization: str,
    gpu_memory_utilization: float = 0.5,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Engine:
    """Load a model, with an adapter if one is given, and return an engine for it.

    This is vLLM if a GPU and vLLM are present and vLLM can load these weights, else the engine that
    `engine_of` returns.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter to load; None for the model alone.
        quantization: "4bit" or "16bit".
        gpu_memory_utilization: Share of the GPU's memory that vLLM takes until it is closed.
        chat_template_kwargs: Defaults for the chat template, as in `load_tokenizer`.
    """
    tokenizer = load_tokenizer(model_path, chat_template_kwargs)
    if use_vllm("detect", quantization):
        return open_vllm(model_path, adapter, quantization, gpu_memory_utilization, tokenizer)
    model = load_checkpoint(model_path, adapter=adapter, quantization=quantization)
    return engine_of(model, tokenizer)
