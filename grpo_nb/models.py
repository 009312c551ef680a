"""Load a tokenizer, a policy to train (Unsloth), or a checkpoint to judge (transformers).

Base and adapter are never confused: `load_checkpoint` says with `adapter=` which it is.
torch, unsloth and transformers are imported inside functions, for they take seconds.
"""

import importlib.util
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.chat import find_model, hub_errors, load_tokenizer, quiet, render
from grpo_nb.config import ModelConfig
from grpo_nb.prompts import Message
from grpo_nb.runs import runs_root

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Policy(NamedTuple):
    """A model that is being trained, and what generates its completions."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    vllm: bool


class Sample(NamedTuple):
    """A completion: its text, how many tokens it took, and whether it ran into the cap."""

    text: str
    tokens: int
    truncated: bool


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def use_vllm(config: ModelConfig) -> bool:
    """Whether Unsloth's `fast_inference` is used: asked for, or a GPU and vLLM are found.

    Raises:
        RuntimeError: Asked for, and not possible on this machine.
    """
    missing = "a CUDA GPU" if not cuda_available() else ""
    if importlib.util.find_spec("vllm") is None:
        missing = missing or "the package vllm"
    if config.fast_inference == "vllm" and missing:
        raise RuntimeError(f"model.fast_inference = 'vllm' needs {missing}: set it to 'detect'")
    return config.fast_inference != "off" and not missing


def load_policy(config: ModelConfig, seed: int) -> Policy:
    """The base model with a fresh LoRA adapter on every linear layer, through Unsloth.

    Args:
        config: Which model, how its weights are kept, rank of the adapter.
        seed: Of the adapter's initial weights.
    """
    # On a GPU Unsloth writes compiled code, by default into the working directory.
    compiled = str(runs_root() / ".unsloth_compiled_cache")
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", compiled)
    vllm = use_vllm(config)
    with quiet(), hub_errors(config.model_path):
        from unsloth import FastLanguageModel

        model, _ = FastLanguageModel.from_pretrained(
            find_model(config.model_path),
            max_seq_length=config.max_seq_length,
            load_in_4bit=config.quantization == "4bit",
            fast_inference=vllm,
            **({"max_lora_rank": config.lora_rank} if vllm else {}),
        )
        model = FastLanguageModel.get_peft_model(
            model,
            r=config.lora_rank,
            lora_alpha=config.lora_alpha,
            # Recomputing activations halves a GPU's memory need and slows a CPU by half.
            use_gradient_checkpointing="unsloth" if cuda_available() else False,
            random_state=seed,
        )
    return Policy(model, load_tokenizer(config.model_path), vllm)


def quantization_config(quantization: str) -> Any:
    """The 4-bit settings Unsloth uses, for transformers; None for 16-bit weights."""
    import torch
    from transformers import BitsAndBytesConfig

    if quantization != "4bit":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )


def load_checkpoint(
    model_path: str, *, adapter: Path | None, quantization: str
) -> "PreTrainedModel":
    """A model to judge, with plain transformers and peft.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter to lay over it; None for the model as it is.
        quantization: "4bit" or "16bit".
    """
    with quiet(), hub_errors(model_path):
        import torch
        from transformers import AutoModelForCausalLM

        # Its hint to install a faster kernel repeats in every process.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        # None would override what a checkpoint in 4 bit says of itself.
        settings = quantization_config(quantization)
        model = AutoModelForCausalLM.from_pretrained(
            find_model(model_path),
            **({"quantization_config": settings} if settings else {}),
            dtype=torch.bfloat16,
            device_map="cuda" if cuda_available() else "cpu",
        )
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
    for module in model.modules():
        # Otherwise bitsandbytes repacks the weights of some CPUs at the first forward.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def generate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[list[Message]],
    *,
    max_completion_length: int,
    temperature: float = 0.0,
    num_generations: int = 1,
    seed: int = 0,
    batch_size: int = 64,
) -> list[list[Sample]]:
    """Completions for each prompt, [prompts][num_generations].

    Args:
        model: As `load_checkpoint` gives it.
        tokenizer: Its tokenizer.
        prompts: Chats.
        max_completion_length: Cut after this [tokens].
        temperature: 0 is greedy.
        num_generations: Completions a prompt.
        seed: Of the sampling; the caller's random state is left as it was.
        batch_size: Prompts at a time.
    """
    import torch

    completions: list[list[Sample]] = []
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.random.fork_rng(), torch.inference_mode():
        torch.manual_seed(seed)
        for start in range(0, len(prompts), batch_size):
            texts = [render(tokenizer, prompt) for prompt in prompts[start : start + batch_size]]
            inputs = tokenizer(
                texts, return_tensors="pt", padding=True, add_special_tokens=False
            ).to(model.device)
            ids = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_completion_length,
                num_return_sequences=num_generations,
                pad_token_id=tokenizer.pad_token_id,
                **(sampling if temperature > 0 else {"do_sample": False}),
            )
            new = _samples(tokenizer, model, ids[:, inputs["input_ids"].shape[1] :])
            completions += [
                new[i : i + num_generations] for i in range(0, len(new), num_generations)
            ]
    return completions


def _samples(
    tokenizer: "PreTrainedTokenizerBase", model: "PreTrainedModel", ids: "torch.Tensor"
) -> list[Sample]:
    """Generated ids, [completions, tokens], as text with their lengths up to the first stop."""
    import torch

    known = model.generation_config.eos_token_id
    stops = known if isinstance(known, list) else [known or tokenizer.eos_token_id]
    stopped = torch.isin(ids, torch.tensor(stops, device=ids.device))
    ended = stopped.any(dim=1).tolist()
    first = stopped.int().argmax(dim=1).tolist()
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return [
        Sample(text, stop + 1 if end else ids.shape[1], not end)
        for text, end, stop in zip(texts, ended, first, strict=True)
    ]


def forward_seconds(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", texts: Sequence[str]
) -> float:
    """Seconds of one forward pass over the texts, without gradient."""
    import torch

    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    inputs = inputs.to(model.device)
    started = time.perf_counter()
    with torch.inference_mode():
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits.logits[0, 0, 0].item()  # waits for the GPU
    return time.perf_counter() - started
