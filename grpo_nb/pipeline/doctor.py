"""`python -m grpo_nb doctor`: what this machine has, and the command for whatever it lacks."""

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import psutil

from grpo_nb.checks import Check, shown
from grpo_nb.machine import PROJECT_ROOT, gpu_fault, gpu_name, installed_versions, several_gpus
from grpo_nb.models import cuda_available
from grpo_nb.runs import runs_root
from grpo_nb.runs.profiles import detect_profile
from grpo_nb.sandbox import choose_backend

NEEDED_DISK_GIB = 5
NEEDED_MEMORY_GIB = 4
NO_GPU = "none: training runs on the CPU, with small models; transformers generates"


def examine() -> list[Check]:
    """Return every check, in the order in which the user should fix them."""
    gpu, (sandbox, runs_code) = gpu_name(), _sandbox()
    install = f"make install GPU={int(bool(gpu))}"
    torch, versions = bool(find_spec("torch")), installed_versions()
    checks = [
        *_machine(gpu),
        *((name, text != "not installed", text, install) for name, text in versions.items()),
        ("engine unsloth", torch and bool(find_spec("unsloth")), "", install),
    ]
    if gpu:
        checks.append(("engine cuda", torch and cuda_available(), "", "make clean install GPU=1"))
        # vLLM 0.31 supports bitsandbytes, and so 4-bit weights, only with the plugin.
        for name in ("vllm", "vllm_bnb_plugin"):
            checks.append((f"engine {name}", bool(find_spec(name)), "", install))
    checks.append(("engine sandbox", runs_code, sandbox, "sudo apt-get install bubblewrap"))
    return [
        Check(name, "ok", text or "works") if works else Check(name, "stop", text or "missing", fix)
        for name, works, text, fix in checks
    ]


def _machine(gpu: str) -> Iterator[tuple[str, bool, str, str]]:
    """Yield (name, whether it passes, evidence, fix) for each check of the machine."""
    fault = gpu_fault()
    evidence = "; ".join(filter(None, [gpu or NO_GPU, fault or several_gpus()]))
    fix = "install a newer driver, use another GPU, or go without: make clean install GPU=0"
    yield "gpu", not fault, evidence, fix
    python = f"Python {platform.python_version()}"
    yield "cpu", True, f"{os.cpu_count()} cores, {platform.machine()}, {python}", ""
    root = runs_root() if runs_root().exists() else PROJECT_ROOT
    disk, memory = shutil.disk_usage(root).free / 2**30, psutil.virtual_memory().available / 2**30
    move = "export GRPO_NB_RUNS=/a/larger/disk"
    yield "disk", disk >= NEEDED_DISK_GIB, f"{disk:.0f} GiB free for runs/", move
    yield "memory", memory >= NEEDED_MEMORY_GIB, f"{memory:.0f} GiB free", "jupyter lab stop"


def _sandbox() -> tuple[str, bool]:
    try:
        return f"{choose_backend()} runs generated code", True
    except RuntimeError as error:
        return str(error), False


def report() -> int:
    """Print every check and the profile, and return the exit code: 1 if a check fails."""
    checks = examine()
    print(*(shown(*check) for check in checks), sep="\n")
    print(f"profile {detect_profile()} fits this machine")
    return int(any(check.state == "stop" for check in checks))
