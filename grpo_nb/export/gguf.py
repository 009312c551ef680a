"""GGUF, through a llama.cpp that is there already. Nothing is downloaded or installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from grpo_nb.export.merging import check_complete
from grpo_nb.runs import Run, atomic_path

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"


def find_tools(kind: str, llama_cpp: str = "") -> list[str]:
    """The converter, and the quantizer where `kind` needs one.

    Args:
        llama_cpp: A llama.cpp checkout; default: `$LLAMA_CPP`, else what is on the PATH.

    Raises:
        RuntimeError: What exactly is missing, and how one gets it.
    """
    given = llama_cpp or os.environ.get("LLAMA_CPP", "")
    path = os.pathsep.join([given, f"{given}/build/bin"]) if given else None
    names = [CONVERTER, QUANTIZER] if kind == "q4_k_m" else [CONVERTER]
    found = {name: shutil.which(name, os.F_OK, path) for name in names}
    missing = [name for name in names if found[name] is None]
    if missing:
        build = ", build it with `cmake -B build && cmake --build build -t llama-quantize`"
        raise RuntimeError(
            f"GGUF {kind} needs llama.cpp, whose {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not in {given or 'the PATH'}. Nothing was "
            "installed. Get it with `git clone https://github.com/ggml-org/llama.cpp`"
            f"{build * (QUANTIZER in missing)} and give its folder with --llama-cpp DIR"
        )
    return [found[name] for name in names]


def to_gguf(run: Run, kind: str, llama_cpp: str = "") -> Path:
    """Write model/NAME-KIND.gguf from the merged model.

    Args:
        kind: "f16", "q8_0" or "q4_k_m"; the last goes by way of f16.
        llama_cpp: See `find_tools`.

    Raises:
        RuntimeError: A tool is missing, or fails; its last words are given.
    """
    converter, *quantizer = find_tools(kind, llama_cpp)
    source, target = check_complete(run / "model/merged"), run / f"model/{run.name}-{kind}.gguf"
    with atomic_path(target) as temporary:
        first = temporary.with_suffix(".f16") if quantizer else temporary
        outtype = "f16" if quantizer else kind
        options = ["--outfile", str(first), "--outtype", outtype]
        try:
            _call([sys.executable, converter, str(source), *options])
            if quantizer:
                _call([*quantizer, str(first), str(temporary), kind.upper()])
        finally:
            if quantizer:
                first.unlink(missing_ok=True)
    return target


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-4:])
        raise RuntimeError(f"{Path(command[0]).name} {command[1]} failed:\n{said}")
