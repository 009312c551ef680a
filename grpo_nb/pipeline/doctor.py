"""`python -m grpo_nb doctor`: what this machine has, and the one command for what it lacks."""

import importlib.util
import os
import platform
import shutil
import sys

import psutil

from grpo_nb.machine import gpu_fault, gpu_name, several_gpus
from grpo_nb.models import cuda_available
from grpo_nb.rewards.sandbox import choose_backend
from grpo_nb.runs import PROJECT_ROOT, Check, installed_versions, runs_root
from grpo_nb.runs.profiles import detect_profile

NEEDED_DISK_GIB = 5
NEEDED_MEMORY_GIB = 4


def examine() -> list[Check]:
    """Every check, in the order in which a person would fix them."""
    gpu = gpu_name()
    install = f"make install GPU={int(bool(gpu))}"
    ready = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return [
        _check("python", ready, platform.python_version(), "make install PYTHON=python3.11"),
        _gpu(gpu),
        *_resources(),
        *(
            _check(package, version != "not installed", version, install)
            for package, version in installed_versions().items()
        ),
        *_engines(bool(gpu), install),
        _sandbox(),
    ]


def _check(name: str, good: bool, found: str, fix: str = "") -> Check:
    return Check(name, "ok" if good else "stop", found, "" if good else fix)


def _gpu(gpu: str) -> Check:
    if fault := gpu_fault():
        fix = "a newer driver or another GPU; to go without: make clean install GPU=0"
        return _check("gpu", False, f"{gpu}: {fault}", fix)
    found = gpu or "none: training runs on the CPU, with small models"
    return _check("gpu", True, "; ".join(filter(None, [found, several_gpus()])))


def _resources() -> list[Check]:
    root = runs_root() if runs_root().exists() else PROJECT_ROOT
    disk = shutil.disk_usage(root).free / 2**30
    memory = psutil.virtual_memory().available / 2**30
    move, stop = "export GRPO_NB_RUNS=/a/larger/disk", "jupyter lab stop"
    return [
        _check("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}"),
        _check("disk", disk >= NEEDED_DISK_GIB, f"{disk:.0f} GiB free for runs/", move),
        _check("memory", memory >= NEEDED_MEMORY_GIB, f"{memory:.0f} GiB free", stop),
    ]


def _engines(gpu: bool, install: str) -> list[Check]:
    def importable(*modules: str) -> bool:
        return all(importlib.util.find_spec(module) for module in modules)

    unsloth = importable("unsloth", "torch")
    needed = {"unsloth": (unsloth, install)}
    if gpu:
        needed["cuda"] = (unsloth and cuda_available(), "make clean install GPU=1")
        # vLLM 0.31 knows bitsandbytes, and so 4-bit weights, by the plugin alone.
        needed |= {name: (importable(name), install) for name in ("vllm", "vllm_bnb_plugin")}
    engines = [
        _check(f"engine {name}", there, "works" if there else "missing", fix)
        for name, (there, fix) in needed.items()
    ]
    if not gpu:
        vllm = "its CPU build: pytest -m vllm tests it" if importable("vllm") else "needs a GPU"
        engines.append(_check("engine vllm", True, f"{vllm}; transformers generates"))
    return engines


def _sandbox() -> Check:
    try:
        return _check("engine sandbox", True, f"{choose_backend()} runs generated code")
    except RuntimeError as error:
        return _check("engine sandbox", False, str(error), "sudo apt-get install bubblewrap")


def report() -> tuple[str, bool]:
    """(the report as text, whether everything is in order)."""
    checks = examine()
    faults = [check for check in checks if check.state == "stop"]
    lines = [f"{'NO ' if c in faults else 'ok '} {c.name:<22} {c.evidence}" for c in checks]
    lines.append(f"profile {detect_profile()} fits this machine")
    return "\n".join([*lines, *(f"to fix {c.name}: {c.fix}" for c in faults)]), not faults
