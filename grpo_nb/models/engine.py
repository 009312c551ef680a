"""Engines from disk: transformers, Unsloth, or vLLM, whose `Engine` is here."""

import importlib.util
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_nb.models.chat import find_model, hub_errors, load_tokenizer, quiet
from grpo_nb.models.checkpoint import cuda_available, load_checkpoint, weights_dtype
from grpo_nb.models.generation import Engine, Sample, Sampling, TransformersEngine, free_memory
from grpo_nb.runs import runs_root
from grpo_nb.runs.profiles import refuse_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BNB_PLUGIN = "the package vllm-bnb-plugin (pip install --no-deps vllm-bnb-plugin==0.0.3)"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters it makes room for


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
        engine = "vllm" if cuda_available() and not vllm_lacks(quantization) else "transformers"
    elif engine == "vllm" and (lacking := vllm_lacks(quantization)):
        raise RuntimeError(f"engine = 'vllm' needs {lacking}: take 'detect' or 'transformers'")
    tokenizer = load_tokenizer(model_path)
    if engine != "vllm":
        load = load_checkpoint if engine == "transformers" else _load_unsloth
        model = load(model_path, adapter=adapter, quantization=quantization)
        return TransformersEngine(model, tokenizer, engine)
    with quiet(), hub_errors(model_path):
        llm = _load_vllm(model_path, adapter, quantization, gpu_memory_utilization)
        from vllm.lora.request import LoRARequest

    lora = adapter and LoRARequest("adapter", 1, str(adapter.resolve()))
    return VllmEngine(llm, tokenizer, lambda: lora)


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


def vllm_lacks(quantization: str) -> str:
    """What vLLM is without to load such weights here, or nothing.

    Since 0.28 vLLM has bitsandbytes' loader in a package of its own, which it knows of once its
    plugins are loaded (vllm_bnb_plugin/__init__.py 0.0.3, register).
    """
    if importlib.util.find_spec("vllm") is None:
        return "the package vllm"
    if quantization == "4bit":
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

        if "bitsandbytes" not in QUANTIZATION_METHODS:
            return f"{BNB_PLUGIN} for 4-bit weights"
    return ""


def lora_rank(adapter: Path) -> int:
    """The smallest of the ranks that vLLM makes room for that holds the adapter.

    Raises:
        ValueError: None does.
    """
    rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))["r"]
    if rank > VLLM_RANKS[-1]:
        raise ValueError(f"{adapter} has rank {rank}, and vLLM takes at most {VLLM_RANKS[-1]}")
    return next(room for room in VLLM_RANKS if room >= rank)


def _load_vllm(model_path: str, adapter: Path | None, quantization: str, share: float) -> Any:
    """`vllm.LLM`, with room for the adapter."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    options: dict[str, Any] = {}
    if adapter is not None:
        options = {"enable_lora": True, "max_lora_rank": lora_rank(adapter)}
    return LLM(
        find_model(model_path),
        dtype=weights_dtype(),
        quantization="bitsandbytes" if quantization == "4bit" else None,
        gpu_memory_utilization=share,
        max_model_len=-1,  # the model's own, or what fits into that memory
        enforce_eager=not cuda_available(),
        **options,
    )


class VllmEngine(Engine):
    """A `vllm.LLM`, of its own or Unsloth's.

    Args:
        llm: The engine.
        lora: Gives the request for the adapter as it is now; None: there is none.
    """

    def __init__(
        self, llm: Any, tokenizer: "PreTrainedTokenizerBase", lora: Callable[[], Any]
    ) -> None:
        super().__init__(tokenizer, "vllm")
        self._llm, self._lora = llm, lora

    def _answer(self, texts: Sequence[str], asked: Sampling) -> list[Sample]:
        tokens = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        # vLLM counts on from a prompt's seed within its group; two prompts must not share one.
        n = asked.num_generations
        how = [self._parameters(asked, asked.seed + index * n) for index in range(len(tokens))]
        lora = self._lora() if asked.adapter else None
        answers = self._run(tokens, how, lora, asked.on_text)
        if self._llm.llm_engine.vllm_config.model_config.enable_sleep_mode:  # it woke to answer
            self._llm.sleep(1)
        return [
            Sample(
                self.tokenizer.decode(one.token_ids, skip_special_tokens=True),
                len(one.token_ids),
                one.finish_reason == "length",
            )
            for answer in answers
            for one in answer.outputs
        ]

    def _parameters(self, asked: Sampling, seed: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            n=asked.num_generations,
            temperature=asked.temperature,
            max_tokens=asked.max_completion_length,
            seed=seed,
        )

    def _run(
        self, tokens: list, how: list, lora: Any, on_text: Callable[[str], None] | None
    ) -> Sequence[Any]:
        """vLLM's answers; step by step where somebody reads along."""
        prompts = [{"prompt_token_ids": ids} for ids in tokens]
        if on_text is None:
            return self._llm.generate(prompts, how, use_tqdm=False, lora_request=lora)
        core, answers = self._llm.llm_engine, []
        core.add_request("read along", prompts[0], how[0], lora_request=lora)
        try:
            while core.has_unfinished_requests():
                if said := core.step():
                    answers = said
                    on_text(said[0].outputs[0].text)
        finally:
            core.abort_request(["read along"])  # an interrupt must not leave it running
        return answers

    def forward_seconds(self, texts: Sequence[str]) -> float:
        tokens = [self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        asked = Sampling(1, 0.0, 1, 0, len(texts), True, None)
        self._llm.reset_prefix_cache()
        started = time.perf_counter()
        self._run(tokens, [self._parameters(asked, 0)] * len(tokens), None, None)
        return time.perf_counter() - started

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm.llm_engine  # whoever still holds the LLM then holds no weights and no cache
        free_memory()
