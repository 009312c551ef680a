"""Where vLLM is chosen, for everything that generates, and how it is loaded."""

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any, Literal

from grpo_nb.models.chat import find_model
from grpo_nb.models.weights import cuda_available, weights_dtype
from grpo_nb.runs.config import PolicyConfig
from grpo_nb.runs.files import read_json

BNB_PLUGIN = "the package vllm-bnb-plugin (pip install --no-deps vllm-bnb-plugin==0.0.3)"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM makes room for
Driver = Literal["engine", "Unsloth", "TRL"]
ASKED = {  # by what setting, and what to do where that cannot be
    "engine": ("engine = 'vllm'", "take 'detect' or 'transformers'"),
    "Unsloth": ("model.fast_inference = 'vllm'", "set it to 'detect'"),
    "TRL": ("trl.vllm_mode", "set it, or leave trl.vllm_mode out"),
}


def use_vllm(
    asked: str, quantization: str, by: Driver = "engine", policy: PolicyConfig | None = None
) -> bool:
    """Whether vLLM generates: asked for, or to be used where this machine can.

    Args:
        asked: "vllm", "detect" (where a GPU and vLLM are found), or anything else for no.
        quantization: "4bit" or "16bit".
        by: What drives it: an engine of ours; or, in a training, Unsloth
            (`model.fast_inference`) or TRL (`trl.vllm_mode`).
        policy: That is trained.

    Raises:
        RuntimeError: Asked for, and not possible on this machine or with this policy.
    """
    if asked not in ("vllm", "detect"):
        return False
    policy, found = policy or PolicyConfig(), importlib.util.find_spec
    gpu = {"a CUDA GPU": cuda_available()}
    # vLLM itself is not asked: Unsloth has to be imported before it.
    packages = {
        "the package vllm": found("vllm"),
        f"{BNB_PLUGIN} for 4-bit weights": quantization != "4bit" or found("vllm_bnb_plugin"),
    }
    of_unsloth = {
        "policy.backend = 'unsloth'": policy.backend == "unsloth",
        "policy.finetuning = 'lora'": policy.finetuning == "lora",
    }
    needs = {
        "engine": packages if asked == "vllm" else gpu | packages,  # vLLM's CPU build will do
        "Unsloth": of_unsloth | gpu | packages,
        "TRL": {
            "policy.backend = 'transformers'": policy.backend == "transformers",
            "model.quantization = '16bit'": quantization == "16bit",
        },
    }
    missing = next((need for need, met in needs[by].items() if not met), "")
    if missing and asked == "vllm":
        setting, instead = ASKED[by]
        raise RuntimeError(f"{setting} needs {missing}: {instead}")
    if missing.startswith(BNB_PLUGIN):
        warnings.warn(f"transformers generates, since vLLM needs {missing}", stacklevel=2)
    return not missing


def lora_rank(adapter: Path) -> int:
    """The smallest of the ranks that vLLM makes room for that holds the adapter.

    Raises:
        ValueError: None does.
    """
    rank = read_json(adapter / "adapter_config.json")["r"]
    if rank > RANKS[-1]:
        raise ValueError(f"{adapter} has rank {rank}, and vLLM takes at most {RANKS[-1]}")
    return next(room for room in RANKS if room >= rank)


def load_vllm(model_path: str, adapter: Path | None, quantization: str, share: float) -> Any:
    """`vllm.LLM` on this share of the GPU's memory, with room for the adapter."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    lora = adapter and {"enable_lora": True, "max_lora_rank": lora_rank(adapter)}
    return LLM(
        find_model(model_path),
        dtype=weights_dtype(),
        quantization="bitsandbytes" if quantization == "4bit" else None,
        gpu_memory_utilization=share,
        max_model_len=-1,  # the model's own, or what fits into that memory
        enforce_eager=not cuda_available(),
        **(lora or {}),
    )
