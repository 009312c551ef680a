"""What a result comes from: this machine's NVIDIA GPU, the environment, packages and the code.

Nothing but Python's own library: Colab's set-up asks before anything is installed.
"""

import atexit
import gc
import os
import re
import shutil
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth", "datasets")
EXECUTED = ("grpo_nb", "data")


def _ask_nvidia(fields: str) -> list[str]:
    """What nvidia-smi says of each GPU; [] without one."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    if shutil.which(query[0]) is None:
        return []
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def gpu_name() -> str:
    """Name and memory of the first NVIDIA GPU, as nvidia-smi says them; "" without one."""
    return next(iter(_ask_nvidia("name,memory.total")), "")


def gpu_fault() -> str:
    """Why torch, which is built for CUDA 13, cannot use the GPU that is there; else ""."""
    # CUDA 13.0's release notes: a driver from 580 on; nothing before Turing, which is 7.5.
    for field, least, what in (
        ("driver_version", 580, "the NVIDIA driver"),
        ("compute_cap", 7.5, "the compute capability of this GPU,"),
    ):
        found = re.match(r"\d+(\.\d+)?", next(iter(_ask_nvidia(field)), ""))
        if found and float(found[0]) < least:
            return f"{what} {found[0]} is too old: CUDA 13 needs {least} or later"
    return ""


def visible_gpus() -> list[str]:
    """The numbers of the GPUs that a process may use: $CUDA_VISIBLE_DEVICES, or all there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [str(number) for number in range(len(_ask_nvidia("name")))]
    return [gpu for gpu in visible.split(",") if gpu not in ("", "-1")]


def several_gpus() -> str:
    """What to do where a process sees several GPUs, of which Unsloth trains on one; else ""."""
    count = len(visible_gpus())
    return f"{count} GPUs are visible: for Unsloth export CUDA_VISIBLE_DEVICES=0" * (count > 1)


def gpu_in_use() -> str:
    """The GPU's name and memory, if this process may use it; else ""."""
    return "" if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else gpu_name()


def wait_passively() -> None:
    """Let idle threads of torch sleep, here and in child processes, unless the person says else.

    Threads of libgomp spin while they wait, which takes the processors from other processes
    (benchmarks/threads.py). It reads the variable when torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@cache
def skip_garbage_at_exit() -> None:
    """Let Python end without a search for garbage: with torch and Unsloth loaded it takes 2 s."""
    atexit.register(gc.freeze)


def bound_kernels() -> None:
    """Let oneDNN keep the kernels of few shapes of matrices, unless the person says else.

    A training in bf16 meets new shapes in each step, and oneDNN keeps 1024 kernels by default: see
    docs/performance.md. It reads the variable at its first kernel.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def switches() -> dict[str, str]:
    """What the environment tells Unsloth and vLLM, which changes a training; secrets left out."""
    names = [name for name in os.environ if name.startswith(("UNSLOTH_", "VLLM_"))]
    secret = re.compile("KEY|TOKEN|SECRET|PASSW")
    return {n: "(secret)" if secret.search(n) else os.environ[n] for n in sorted(names)}


def version_of(package: str) -> str:
    """What is installed, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def installed_versions() -> dict[str, str]:
    """Versions of the packages a result depends on."""
    return {package: version_of(package) for package in PACKAGES}


def git_commit() -> str:
    """The project's commit; "unknown" outside a checkout.

    Behind it "-dirty" if what a run executes differs from it: the package, and the models and
    rows that come with it. A notebook differs as soon as its parameters are set, and is kept with
    the run as it was executed.
    """
    git = ["git", "-C", str(PROJECT_ROOT)]
    command = [*git, "describe", "--always", "--abbrev=40", "--exclude=*"]  # no tags
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *EXECUTED], check=False)
    except FileNotFoundError:
        return "unknown"
    dirty = "-dirty" if changed.returncode else ""
    return done.stdout.strip() + dirty if done.returncode == 0 else "unknown"
