"""`python -m grpo_nb doctor`: what this machine has, and the one command for what it lacks."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import psutil

from grpo_nb.machine import gpu_fault, gpu_name, several_gpus
from grpo_nb.models import cuda_available
from grpo_nb.rewards.sandbox import choose_backend
from grpo_nb.runs import PROJECT_ROOT, Check, installed_versions, runs_root
from grpo_nb.runs.checks import shown
from grpo_nb.runs.profiles import detect_profile

NEEDED_DISK_GIB = 5
NEEDED_MEMORY_GIB = 4
NO_GPU = "none: training runs on the CPU, with small models"
Found = tuple[str, bool, str, str]  # name, whether it is in order, what there is, how to fix it


def examine() -> list[Check]:
    """Every check, in the order in which a person would fix them."""
    gpu = gpu_name()
    install = f"make install GPU={int(bool(gpu))}"
    found = [*_machine(gpu)]
    for package, version in installed_versions().items():
        found.append((package, version != "not installed", version, install))
    found += [*_engines(bool(gpu), install), _sandbox()]
    return [
        Check(name, "ok" if good else "stop", there, "" if good else fix)
        for name, good, there, fix in found
    ]


def _machine(gpu: str) -> Iterator[Found]:
    ready = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield "python", ready, platform.python_version(), "make install PYTHON=python3.11"
    fault = gpu_fault()
    said = "; ".join(filter(None, [gpu or NO_GPU, fault or several_gpus()]))
    fix = "a newer driver or another GPU; to go without: make clean install GPU=0"
    yield "gpu", not fault, said, fix
    yield "cpu", True, f"{os.cpu_count()} cores, {platform.machine()}", ""
    root = runs_root() if runs_root().exists() else PROJECT_ROOT
    disk, memory = shutil.disk_usage(root).free / 2**30, psutil.virtual_memory().available / 2**30
    move = "export GRPO_NB_RUNS=/a/larger/disk"
    yield "disk", disk >= NEEDED_DISK_GIB, f"{disk:.0f} GiB free for runs/", move
    yield "memory", memory >= NEEDED_MEMORY_GIB, f"{memory:.0f} GiB free", "jupyter lab stop"


def _engines(gpu: bool, install: str) -> Iterator[Found]:
    needed = {"unsloth": (bool(find_spec("unsloth") and find_spec("torch")), install)}
    if gpu:
        needed["cuda"] = (bool(find_spec("torch")) and cuda_available(), "make clean install GPU=1")
        # vLLM 0.31 knows bitsandbytes, and so 4-bit weights, by the plugin alone.
        needed |= {name: (bool(find_spec(name)), install) for name in ("vllm", "vllm_bnb_plugin")}
    for name, (there, fix) in needed.items():
        yield f"engine {name}", there, "works" if there else "missing", fix
    if not gpu:
        vllm = "its CPU build: pytest -m vllm tests it" if find_spec("vllm") else "needs a GPU"
        yield "engine vllm", True, f"{vllm}; transformers generates", ""


def _sandbox() -> Found:
    try:
        return "engine sandbox", True, f"{choose_backend()} runs generated code", ""
    except RuntimeError as error:
        return "engine sandbox", False, str(error), "sudo apt-get install bubblewrap"


def report() -> tuple[str, bool]:
    """(the report as text, whether everything is in order)."""
    checks = examine()
    lines = [*(shown(*check) for check in checks), f"profile {detect_profile()} fits this machine"]
    return "\n".join(lines), not any(check.state == "stop" for check in checks)
