"""Decide whether vLLM can run, start it, and sample with it."""

import importlib.util
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.models.adapter import adapter_config
from grpo_nb.models.engine import Chats, Engine, Sample, Sampling, free_memory
from grpo_nb.models.hub import find_model, image_tokens, quiet
from grpo_nb.models.template import render
from grpo_nb.models.weights import cuda_available, weights_dtype
from grpo_nb.rewards.prompts import images_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BNB_PLUGIN = "the package vllm-bnb-plugin (pip install --no-deps vllm-bnb-plugin==0.0.3)"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # adapter ranks for which vLLM can reserve room


def use_vllm(choice: str, quantization: str) -> bool:
    """Return whether to generate completions with vLLM.

    Args:
        choice: "vllm"; "detect" for vLLM if it and a GPU are present; any other value for no vLLM.
        quantization: "4bit" or "16bit".

    Raises:
        RuntimeError: The choice is "vllm", but vLLM cannot run on this machine.
    """
    if choice not in ("vllm", "detect"):
        return False
    # vLLM itself is not imported here, because Unsloth must be imported before it.
    needs = {"a CUDA GPU": cuda_available(), "the package vllm": importlib.util.find_spec("vllm")}
    if quantization == "4bit":
        needs[f"{BNB_PLUGIN} for 4-bit weights"] = importlib.util.find_spec("vllm_bnb_plugin")
    missing = next((need for need, met in needs.items() if not met), "")
    if missing and choice == "vllm":
        setting = "model.fast_inference"
        raise RuntimeError(
            f"{setting} = 'vllm' needs {missing}; otherwise set {setting} = 'detect'"
        )
    if missing.startswith(BNB_PLUGIN):
        warnings.warn(f"transformers generates, since vLLM needs {missing}", stacklevel=2)
    return not missing


def without(tokens: Sequence[int]) -> dict[int, float] | None:
    """Return a logit bias that keeps vLLM from sampling these tokens; None for no tokens."""
    return dict.fromkeys(tokens, -100.0) or None


class VllmEngine(Engine):
    """Sample with a `vllm.LLM` that was started by `open_vllm` or by Unsloth.

    Args:
        llm: The `vllm.LLM`.
        tokenizer: The model's tokenizer.
        lora: A function that returns vLLM's LoRA request for the current adapter, or None.
    """

    name = "vllm"

    def __init__(
        self, llm: Any, tokenizer: "PreTrainedTokenizerBase", lora: Callable[[], Any]
    ) -> None:
        super().__init__(tokenizer)
        self._llm, self._lora = llm, lora

    def complete(
        self, ids: Sequence[Sequence[int]], sampling: Sampling, chats: Chats = ()
    ) -> list[Sample]:
        from vllm import SamplingParams

        n, prompts = sampling.num_generations, [{"prompt_token_ids": list(one)} for one in ids]
        for prompt, chat in zip(prompts, chats, strict=False):
            if images := images_of(chat):  # vLLM itself expands an image's placeholder
                text = render(self.tokenizer, chat)
                tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
                prompt |= {"prompt_token_ids": tokens, "multi_modal_data": {"image": images}}
        model_config = self._llm.llm_engine.vllm_config.model_config
        options = {"n": n, "temperature": sampling.temperature}
        options |= {"max_tokens": sampling.max_completion_length}
        options |= {"logit_bias": without(image_tokens(model_config.hf_config))}
        # vLLM increments the seed within a group, so no two completions share a seed.
        seeds = range(sampling.seed, sampling.seed + n * len(ids), n)
        params = [SamplingParams(seed=seed, **options) for seed in seeds]
        lora = self._lora() if sampling.adapter else None
        sleeps = model_config.enable_sleep_mode
        if sleeps:  # a sleeping vLLM would never answer
            self._llm.wake_up()
        answers = self._llm.generate(prompts, params, use_tqdm=False, lora_request=lora)
        if sleeps:
            self._llm.sleep(1)
        return [
            Sample(
                self.tokenizer.decode(one.token_ids, skip_special_tokens=True),
                len(one.token_ids),
                one.finish_reason == "length",
                list(one.token_ids),
            )
            for answer in answers
            for one in answer.outputs
        ]

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm.llm_engine  # so that other references keep no weights or cache
        free_memory()


def open_vllm(
    model_path: str,
    adapter: Path | None,
    quantization: str,
    share: float,
    tokenizer: "PreTrainedTokenizerBase",
) -> VllmEngine:
    """Start vLLM with this share of the GPU's memory and room for the adapter, if there is one."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rank = adapter_config(adapter)["r"] if adapter else 1
    with quiet():
        from vllm import LLM
        from vllm.lora.request import LoRARequest

        llm = LLM(
            find_model(model_path),
            dtype=weights_dtype(),
            quantization="bitsandbytes" if quantization == "4bit" else None,
            gpu_memory_utilization=share,
            max_model_len=-1,  # the model's own maximum, or as much as fits into that memory
            enforce_eager=not cuda_available(),
            enable_lora=adapter is not None,
            max_lora_rank=min((room for room in RANKS if room >= rank), default=rank),
        )
    lora = LoRARequest("adapter", 1, str(adapter.resolve())) if adapter else None
    return VllmEngine(llm, tokenizer, lambda: lora)
