"""`python -m grpo_nb doctor`: what this machine has, and the command for whatever it lacks."""

import os
import platform
import shutil
from importlib.util import find_spec

import psutil

from grpo_nb.checks import Check, shown
from grpo_nb.machine import PROJECT_ROOT, gpu_fault, gpu_name, installed_versions
from grpo_nb.models import cuda_available
from grpo_nb.runs import runs_root
from grpo_nb.runs.profiles import detect_profile
from grpo_nb.sandbox import choose_backend

NEEDED_DISK_GIB, NEEDED_MEMORY_GIB = 5, 4
NO_GPU = "none: training runs on the CPU, with small models; transformers generates"
DRIVER = "install a newer driver, use another GPU, or go without: make clean install GPU=0"
MOVE = "export GRPO_NB_RUNS=/a/larger/disk"


def examine() -> list[Check]:
    """Return every check, in the order in which the user should fix them."""
    gpu, fault, python = gpu_name(), gpu_fault(), f"Python {platform.python_version()}"
    root = runs_root() if runs_root().exists() else PROJECT_ROOT
    disk, memory = shutil.disk_usage(root).free / 2**30, psutil.virtual_memory().available / 2**30
    device = "; ".join(filter(None, [gpu or NO_GPU, fault]))
    lines = [  # name, whether it passes, evidence, fix
        ("gpu", not fault, device, DRIVER),
        ("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}, {python}", ""),
        ("disk", disk >= NEEDED_DISK_GIB, f"{disk:.0f} GiB free for runs/", MOVE),
        ("memory", memory >= NEEDED_MEMORY_GIB, f"{memory:.0f} GiB free", "jupyter lab stop"),
    ]
    install, versions = f"make install GPU={int(bool(gpu))}", installed_versions()
    lines += [(name, text != "not installed", text, install) for name, text in versions.items()]
    if gpu:  # vLLM 0.31 supports bitsandbytes, and so 4-bit weights, only with the plugin
        lines.append(("engine cuda", cuda_available(), "", "make clean install GPU=1"))
        for name in ("vllm", "vllm_bnb_plugin"):
            lines.append((f"engine {name}", bool(find_spec(name)), "", install))
    try:
        lines.append(("engine sandbox", True, f"{choose_backend()} runs generated code", ""))
    except RuntimeError as error:
        lines.append(("engine sandbox", False, str(error), "sudo apt-get install bubblewrap"))
    return [
        Check(name, "ok", text or "works") if works else Check(name, "stop", text or "missing", fix)
        for name, works, text, fix in lines
    ]


def report() -> int:
    """Print every check and the profile, and return the exit code: 1 if a check fails."""
    checks = examine()
    print(*(shown(*check) for check in checks), sep="\n")
    print(f"profile {detect_profile()} fits this machine")
    return int(any(check.state == "stop" for check in checks))
