"""Load a tokenizer, a policy to train, a checkpoint to judge, or an engine that answers.

Base and adapter are never confused: whatever loads weights says with `adapter=` which it is.
torch, unsloth, transformers and vllm are imported inside functions, for they take seconds.
"""

from grpo_nb.chat import load_tokenizer
from grpo_nb.models.checkpoint import (
    cuda_available,
    has_bf16,
    load_checkpoint,
    load_weights,
    quantization_config,
    sharded,
    weights_dtype,
)
from grpo_nb.models.engine import Engine, open_engine
from grpo_nb.models.generation import Sample, forward_seconds, generate
from grpo_nb.models.policy import Policy, load_policy, use_vllm

__all__ = [
    "Engine",
    "Policy",
    "Sample",
    "cuda_available",
    "forward_seconds",
    "generate",
    "has_bf16",
    "load_checkpoint",
    "load_policy",
    "load_tokenizer",
    "load_weights",
    "open_engine",
    "quantization_config",
    "sharded",
    "use_vllm",
    "weights_dtype",
]
