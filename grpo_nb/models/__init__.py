# ruff: noqa: F401 (the imports below are the package's public names)
"""Load a tokenizer, a policy to train, a checkpoint to evaluate, or an engine that samples.

A base and its adapter are separate arguments: `model_path` and `adapter`.
torch, unsloth, transformers and vllm take seconds to import, so functions import them when needed.
"""

from grpo_nb.models.adapter import name_layers, trained_base
from grpo_nb.models.engine import (
    Engine,
    Progress,
    Sample,
    TransformersEngine,
    free_memory,
    part_of,
)
from grpo_nb.models.hub import load_tokenizer, save_tokenizer, tokenizer_of
from grpo_nb.models.policy import (
    Policy,
    engine_of,
    load_policy,
    load_weights,
    lora_arguments,
    model_arguments,
    open_engine,
    policy_of,
    set_environment,
    unsloth_loads,
)
from grpo_nb.models.vllm import use_vllm
from grpo_nb.models.weights import (
    adapter_in_fp32,
    cuda_available,
    has_bf16,
    load_checkpoint,
    load_dequantized,
    sharded,
    unpacked,
)
