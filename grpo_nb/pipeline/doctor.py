"""`python -m grpo_nb doctor`: what this machine has, and the one command for what it lacks."""

import importlib.util
import os
import platform
import shutil
import sys
from typing import NamedTuple

import psutil

from grpo_nb.machine import gpu_fault, gpu_name, several_gpus
from grpo_nb.models import cuda_available
from grpo_nb.rewards.sandbox import choose_backend
from grpo_nb.runs import PROJECT_ROOT, installed_versions, runs_root
from grpo_nb.runs.profiles import detect_profile

NEEDED_DISK_GIB = 5
NEEDED_MEMORY_GIB = 4


class Check(NamedTuple):
    """One line of the report; `fix` is the command to type where `ok` is False."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def examine() -> list[Check]:
    """Every check, in the order a person would mend them."""
    gpu = gpu_name()
    install = f"make install GPU={int(bool(gpu))}"
    ready = (3, 11) <= sys.version_info[:2] <= (3, 13)
    checks = [
        Check("python", ready, platform.python_version(), "make install PYTHON=python3.11"),
        _gpu(gpu),
        *_resources(),
    ]
    for package, version in installed_versions().items():
        checks.append(Check(package, version != "not installed", version, install))
    return [*checks, *_engines(bool(gpu), install), _sandbox()]


def _gpu(gpu: str) -> Check:
    if fault := gpu_fault():
        fix = "a newer driver or another GPU; to go without: make clean install GPU=0"
        return Check("gpu", False, f"{gpu}: {fault}", fix)
    found = gpu or "none: training runs on the CPU, with small models"
    return Check("gpu", True, "; ".join(filter(None, [found, several_gpus()])))


def _resources() -> list[Check]:
    root = runs_root() if runs_root().exists() else PROJECT_ROOT
    disk = shutil.disk_usage(root).free / 2**30
    memory = psutil.virtual_memory().available / 2**30
    move = "export GRPO_NB_RUNS=/a/larger/disk"
    return [
        Check("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}"),
        Check("disk", disk >= NEEDED_DISK_GIB, f"{disk:.0f} GiB free for runs/", move),
        Check("memory", memory >= NEEDED_MEMORY_GIB, f"{memory:.0f} GiB free", "jupyter lab stop"),
    ]


def _engines(gpu: bool, install: str) -> list[Check]:
    def importable(module: str) -> bool:
        return importlib.util.find_spec(module) is not None

    unsloth = importable("unsloth") and importable("torch")
    engines = [_engine("unsloth", unsloth, install)]
    if gpu:
        cuda = unsloth and cuda_available()
        engines.append(_engine("cuda", cuda, "make clean install GPU=1"))
        # vLLM 0.31 knows bitsandbytes, and so 4-bit weights, by the plugin alone.
        for name in ("vllm", "vllm_bnb_plugin"):
            engines.append(_engine(name, importable(name), install))
    else:
        found = "needs a CUDA GPU; transformers generates"
        if importable("vllm"):
            found = "its CPU build: pytest -m vllm tests it; transformers generates"
        engines.append(Check("engine vllm", True, found))
    return engines


def _sandbox() -> Check:
    try:
        found = choose_backend()
    except RuntimeError as error:
        return Check("engine sandbox", False, str(error), "sudo apt-get install bubblewrap")
    return Check("engine sandbox", True, f"{found} runs generated code")


def _engine(name: str, there: bool, fix: str) -> Check:
    return Check(f"engine {name}", there, "works" if there else "missing", fix)


def report() -> tuple[str, bool]:
    """(the report as text, whether everything is in order)."""
    checks = examine()
    lines = [f"{'ok ' if c.ok else 'NO '} {c.name:<22} {c.found}" for c in checks]
    lines.append(f"profile {detect_profile()} fits this machine")
    faults = [check for check in checks if not check.ok]
    lines += [f"to fix {check.name}: {check.fix}" for check in faults]
    return "\n".join(lines), not faults
