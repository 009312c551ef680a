"""Load a tokenizer, a policy to train, a checkpoint to evaluate, or an engine that samples.

A base and its adapter are separate arguments: `model_path` and `adapter`.
torch, unsloth, transformers and vllm take seconds to import, so functions import them when needed.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.models.engine": """Engine Progress Sample TransformersEngine free_memory part_of
            use_vllm""",
        "grpo_nb.models.hub": "load_tokenizer save_tokenizer tokenizer_of",
        "grpo_nb.models.policy": """Policy engine_of load_policy load_weights lora_arguments
            model_arguments open_engine policy_of set_environment unsloth_loads""",
        "grpo_nb.models.weights": """adapter_in_fp32 cuda_available has_bf16 load_checkpoint
            load_dequantized name_layers sharded trained_base unpacked use_torch_head""",
    },
)
