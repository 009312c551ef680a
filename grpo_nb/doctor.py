"""`python -m grpo_nb doctor`: what this machine has, and the one command for what it lacks."""

import importlib.util
import os
import platform
import shutil
import sys
from typing import NamedTuple

import psutil

from grpo_nb.models import cuda_available
from grpo_nb.profiles import detect_profile, gpu_name
from grpo_nb.runs import PROJECT_ROOT, installed_versions, runs_root
from grpo_nb.sandbox import choose_backend

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
        Check("gpu", True, gpu or "none: training runs on the CPU, with small models"),
        *_resources(),
    ]
    for package, version in installed_versions().items():
        checks.append(Check(package, version != "not installed", version, install))
    return [*checks, *_engines(bool(gpu), install), _sandbox()]


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
    engines = [Check("engine unsloth", unsloth, _works(unsloth), install)]
    if gpu:
        cuda = unsloth and cuda_available()
        engines.append(Check("engine cuda", cuda, _works(cuda), "make clean install GPU=1"))
        vllm = importable("vllm")
        engines.append(Check("engine vllm", vllm, _works(vllm), "make install GPU=1"))
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


def _works(present: bool) -> str:
    return "works" if present else "missing"


def report() -> tuple[str, bool]:
    """(the report as text, whether everything is in order)."""
    checks = examine()
    lines = [f"{'ok ' if c.ok else 'NO '} {c.name:<16} {c.found}" for c in checks]
    lines.append(f"profile {detect_profile()} fits this machine")
    faults = [check for check in checks if not check.ok]
    lines += [f"to fix {check.name}: {check.fix}" for check in faults]
    return "\n".join(lines), not faults
