"""Read YAML files of settings: a profile suits a machine; a task sets what the model learns.

A profile's file also states how much memory the GPU must have (`memory_gib`). None of the GPU
profiles has been measured on its GPU: tests/runs/test_config.py estimates their memory, and the
preflight checks it before training starts. Settings that a task lists under a profile's name
apply to that profile only.
"""

import re
from pathlib import Path
from typing import Any

from grpo_nb.files import read_yaml
from grpo_nb.machine import gpu_fault, gpu_name
from grpo_nb.names import refuse_unknown

HERE = Path(__file__).parent
TASKS = {path.stem: read_yaml(path) for path in sorted(HERE.parent.glob("tasks/*.yaml"))}
PROFILES = {path.stem: read_yaml(path) for path in sorted(HERE.glob("*.yaml"))}
# The profiles are ordered by GPU memory [GiB], smallest first.
MEMORY_GIB = {name: profile.pop("memory_gib") for name, profile in PROFILES.items()}
PROFILES = {name: PROFILES[name] for name in sorted(PROFILES, key=MEMORY_GIB.get)}
TINY, REAL = "tiny-cpu", "smollm2-cpu"  # the profiles that need no GPU


def detect_profile(model: Any = "") -> str:
    """Return the largest profile that fits this machine's first GPU.

    Between profiles of equal memory the GPU's name decides. Without a GPU that has at least 14 GiB
    and supports CUDA 13, the result is `tiny-cpu`, whose model trains anywhere.

    Args:
        model: The `model.model_name` that is set, if any. If it is set and no GPU fits, the result
            is `smollm2-cpu` instead, whose other settings suit a real model.
    """
    name, _, memory = ("" if gpu_fault() else gpu_name()).rpartition(",")
    mib = re.match(r"\s*(\d+) MiB", memory)
    gib = int(mib[1]) / 1024 if mib else 0
    most = max(need for need in MEMORY_GIB.values() if need <= gib)
    if not most:
        return REAL if model else TINY
    largest = [profile for profile in PROFILES if MEMORY_GIB[profile] == most]
    matching = [profile for profile in largest if profile.partition("-")[0] in name.lower()]
    return (matching or largest)[0]


def task_settings(task: str, profile: str) -> dict[str, Any]:
    """Return the settings of a task under a profile."""
    refuse_unknown("task", task, list(TASKS))
    everywhere = {name: v for name, v in TASKS[task].items() if name not in PROFILES}
    return everywhere | TASKS[task].get(profile, {})
