"""One handle over what can answer prompts: transformers, vLLM alone, or Unsloth."""

import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from grpo_nb.chat import find_model, hub_errors, load_tokenizer, quiet, render
from grpo_nb.models.checkpoint import cuda_available, load_checkpoint, weights_dtype
from grpo_nb.models.generation import Sample, generate
from grpo_nb.profiles import refuse_unknown
from grpo_nb.prompts import Message
from grpo_nb.runs import runs_root

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of adapters it makes room for


class Generate(Protocol):
    """`grpo_nb.models.generate` without its model and tokenizer."""

    def __call__(
        self,
        prompts: Sequence[list[Message]],
        *,
        max_completion_length: int,
        temperature: float = 0.0,
        num_generations: int = 1,
        seed: int = 0,
        batch_size: int = 64,
    ) -> list[list[Sample]]: ...


class Engine(NamedTuple):
    """Weights that answer: `engine.generate(prompts, max_completion_length=…)`.

    name: "transformers", "vllm" or "unsloth".
    adapter: What lies over the base; None: nothing.
    close: Gives vLLM's memory back; call it before another engine is opened.
    """

    name: str
    adapter: Path | None
    generate: Generate
    close: Callable[[], None]


def open_engine(
    model_path: str,
    *,
    adapter: Path | None,
    quantization: str,
    engine: Literal["transformers", "vllm", "unsloth", "detect"] = "detect",
    gpu_memory_utilization: float = 0.5,
) -> Engine:
    """A base, or a base with its adapter, ready to answer.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter to lay over it; None for the model as it is.
        quantization: "4bit" or "16bit".
        engine: detect: vLLM where a GPU and vLLM are found and it can load these weights, else
            transformers. unsloth changes transformers for the rest of the process.
        gpu_memory_utilization: What vLLM takes, until it is closed [share].

    Raises:
        RuntimeError: vLLM asked for, and not possible here.
        ValueError: Another engine.
    """
    refuse_unknown("engine", engine, ["detect", "transformers", "vllm", "unsloth"])
    if engine == "detect":
        engine = "vllm" if cuda_available() and not _vllm_lacks(quantization) else "transformers"
    elif engine == "vllm" and (lacking := _vllm_lacks(quantization)):
        raise RuntimeError(f"engine = 'vllm' needs {lacking}: take 'detect' or 'transformers'")
    tokenizer = load_tokenizer(model_path)
    if engine != "vllm":
        load = load_checkpoint if engine == "transformers" else _load_unsloth
        model = load(model_path, adapter=adapter, quantization=quantization)
        return Engine(engine, adapter, partial(generate, model, tokenizer), lambda: None)
    with quiet(), hub_errors(model_path):
        llm = _load_vllm(model_path, adapter, quantization, gpu_memory_utilization)
        from vllm.lora.request import LoRARequest

    lora = adapter and LoRARequest("adapter", 1, str(adapter.resolve()))
    answer = partial(generate_vllm, llm, lora, tokenizer)
    return Engine(engine, adapter, answer, llm.llm_engine.engine_core.shutdown)


def import_unsloth() -> Any:
    """Unsloth's `FastLanguageModel`."""
    # On a GPU Unsloth writes compiled code, by default into the working directory.
    compiled = str(runs_root() / ".unsloth_compiled_cache")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", compiled)
    from unsloth import FastLanguageModel

    return FastLanguageModel


def _load_unsloth(model_path: str, *, adapter: Path | None, quantization: str) -> Any:
    """As `load_checkpoint`, with Unsloth's kernels where there is a GPU."""
    with quiet(), hub_errors(model_path):
        fast = import_unsloth()
        model, _ = fast.from_pretrained(
            find_model(model_path), dtype=weights_dtype(), load_in_4bit=quantization == "4bit"
        )
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
        fast.for_inference(model)
    return model


def _vllm_lacks(quantization: str) -> str:
    """What vLLM is without to load such weights here, or nothing."""
    if importlib.util.find_spec("vllm") is None:
        return "the package vllm"
    if quantization == "4bit":
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
        from vllm.platforms import current_platform

        named = current_platform.supported_quantization or QUANTIZATION_METHODS
        if "bitsandbytes" not in set(named) & set(QUANTIZATION_METHODS):
            return "16bit weights, for this build of it has no loader for bitsandbytes' 4bit"
    return ""


def _load_vllm(model_path: str, adapter: Path | None, quantization: str, share: float) -> Any:
    """`vllm.LLM`, with room for the adapter."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    options: dict[str, Any] = {}
    if adapter is not None:
        config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
        rank = next((rank for rank in VLLM_RANKS if rank >= config["r"]), config["r"])
        options = {"enable_lora": True, "max_lora_rank": rank}
    return LLM(
        find_model(model_path),
        dtype=weights_dtype(),
        quantization="bitsandbytes" if quantization == "4bit" else None,
        gpu_memory_utilization=share,
        max_model_len=-1,  # the model's own, or what fits into that memory
        enforce_eager=not cuda_available(),
        **options,
    )


def generate_vllm(
    llm: Any,
    lora: Any,
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    *,
    max_completion_length: int,
    temperature: float = 0.0,
    num_generations: int = 1,
    seed: int = 0,
    batch_size: int = 64,
) -> list[list[Sample]]:
    """`generate` by vLLM, which makes up its batches itself.

    Args:
        llm: A `vllm.LLM`.
        lora: Request for the adapter; None: the base answers.
    """
    from vllm import SamplingParams

    texts = [render(tokenizer, prompt) for prompt in prompts]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    # vLLM counts on from a prompt's seed within its group; two prompts must not share one.
    sampling = [
        SamplingParams(
            n=num_generations,
            temperature=temperature,
            max_tokens=max_completion_length,
            seed=seed + index * num_generations,
        )
        for index in range(len(ids))
    ]
    tokens = [{"prompt_token_ids": one} for one in ids]
    answers = llm.generate(tokens, sampling, use_tqdm=False, lora_request=lora)
    return [
        [
            Sample(
                tokenizer.decode(one.token_ids, skip_special_tokens=True),
                len(one.token_ids),
                one.finish_reason == "length",
            )
            for one in answer.outputs
        ]
        for answer in answers
    ]
