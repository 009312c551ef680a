"""Load a tokenizer, a policy to train (Unsloth), or a checkpoint to judge (transformers).

Base and adapter are never confused: `load_checkpoint` says with `adapter=` which it is.
torch, unsloth and transformers are imported inside functions, for they take seconds.
"""

import contextlib
import importlib.util
import io
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.config import ModelConfig
from grpo_nb.prompts import Message
from grpo_nb.runs import project_path, runs_root

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Policy(NamedTuple):
    """A model that is being trained, and what generates its completions."""

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    vllm: bool


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


def find_model(model_path: str) -> str:
    """A local folder as an absolute path, or a hub name as it is.

    Raises:
        FileNotFoundError: Neither a folder with a config.json nor of the form org/name.
    """
    folder = project_path(Path(model_path).expanduser())
    if (folder / "config.json").is_file():
        return str(folder)
    if folder.exists() or model_path.count("/") != 1 or model_path[0] in "/.~":
        raise FileNotFoundError(
            f"model_path {model_path!r}: {folder} holds no config.json. Give the folder of a "
            "saved model, or a hub name such as Qwen/Qwen2.5-1.5B-Instruct"
        )
    return model_path


@contextlib.contextmanager
def _library_output() -> Iterator[None]:
    """Keep banners and bars of the libraries back, unless loading fails."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            yield
    except Exception:
        print(text.getvalue(), file=sys.stderr)
        raise


@contextlib.contextmanager
def _hub_errors(model_path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FileNotFoundError(
            f"model_path {model_path!r} is no local folder and could not be had from the hub "
            f"({str(error).splitlines()[0]}). Check the name and the network, or give a folder"
        ) from error


def load_tokenizer(model_path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer, padding on the left.

    Raises:
        ValueError: It has no chat template, so that prompts cannot be rendered.
    """
    with _library_output(), _hub_errors(model_path):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(find_model(model_path), padding_side="left")
    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer of {model_path!r} has no chat template: take an instruct model, or "
            "save one with tokenizer.chat_template = … and tokenizer.save_pretrained(folder)"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def render(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> str:
    """The prompt as the model sees it, ready for its completion."""
    return tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)


def count_tokens(
    tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[list[Message]]
) -> list[int]:
    """Tokens of each rendered prompt; a fast tokenizer takes the batch in parallel."""
    texts = [render(tokenizer, prompt) for prompt in prompts]
    if not tokenizer.is_fast:
        return [len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    fast = tokenizer.backend_tokenizer
    fast.no_padding()  # either may be left over from the call before
    fast.no_truncation()
    return [len(encoding) for encoding in fast.encode_batch_fast(texts, add_special_tokens=False)]


def check_generation_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> None:
    """Raise ValueError unless the chat template ends a prompt where the answer begins."""
    closed = tokenizer.apply_chat_template(prompt, tokenize=False)
    opened = render(tokenizer, prompt)
    if opened == closed or not opened.startswith(closed):
        raise ValueError(
            f"the chat template ignores add_generation_prompt: the prompt ends in {opened[-40:]!r} "
            "and does not open the assistant's turn. Take an instruct model, or correct the "
            "template"
        )


def show_tokens(tokenizer: "PreTrainedTokenizerBase", prompt: list[Message]) -> str:
    """The rendered prompt token by token: ⟦special⟧, others between bars, ⏎ for a line's end."""
    ids = tokenizer(render(tokenizer, prompt), add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    shown = ""
    for token in ids:
        text = tokenizer.decode([token]).replace("\n", "⏎\n")
        shown += f"⟦{text}⟧" if token in special else f"{text}|"
    return shown


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
    with _library_output(), _hub_errors(config.model_path):
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
    with _library_output(), _hub_errors(model_path):
        import torch
        from transformers import AutoModelForCausalLM

        # Its hint to install a faster kernel repeats in every process.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        model = AutoModelForCausalLM.from_pretrained(
            find_model(model_path),
            quantization_config=quantization_config(quantization),
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
) -> list[list[str]]:
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

    completions: list[list[str]] = []
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
            new = tokenizer.batch_decode(
                ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            groups = range(0, len(new), num_generations)
            completions += [new[i : i + num_generations] for i in groups]
    return completions
