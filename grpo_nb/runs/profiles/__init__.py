"""Profiles, which suit a machine, and tasks, which say what is taught: YAML files of settings.

A profile's file also says how much memory the GPU has to have (`memory_gib`). None of the GPU
profiles has been measured on its GPU: their memory is estimated in tests/test_config.py, and
the preflight checks it before a training starts. What a task sets under a profile's name counts
with that profile alone.
"""

import re
from pathlib import Path
from typing import Any

from grpo_nb.machine import gpu_fault, gpu_name
from grpo_nb.runs.files import read_yaml
from grpo_nb.runs.names import refuse_unknown

HERE = Path(__file__).parent
TASKS = {path.stem: read_yaml(path) for path in sorted(HERE.parent.glob("tasks/*.yaml"))}
PROFILES = {path.stem: read_yaml(path) for path in sorted(HERE.glob("*.yaml"))}
# [GiB], by which they are in order, the smallest first.
MEMORY_GIB = {name: profile.pop("memory_gib") for name, profile in PROFILES.items()}
PROFILES = {name: PROFILES[name] for name in sorted(PROFILES, key=MEMORY_GIB.get)}


def detect_profile() -> str:
    """The profile for this machine's first GPU: of those that fit into it, the largest.

    Of two that need the same memory the GPU's name decides. A GPU with less than 14 GiB or too
    old for CUDA 13, or none, gets `tiny-cpu`, whose model trains anywhere.
    """
    name, _, memory = ("" if gpu_fault() else gpu_name()).rpartition(",")
    found = re.match(r"\s*(\d+) MiB", memory)
    gib = int(found[1]) / 1024 if found else 0
    most = max(need for need in MEMORY_GIB.values() if need <= gib)
    largest = [profile for profile in PROFILES if MEMORY_GIB[profile] == most]
    named = [profile for profile in largest if profile.partition("-")[0] in name.lower()]
    return (named or largest)[0]


def task_settings(task: str, profile: str) -> dict[str, Any]:
    """What a task sets with a profile."""
    refuse_unknown("task", task, list(TASKS))
    everywhere = {name: v for name, v in TASKS[task].items() if name not in PROFILES}
    return everywhere | TASKS[task].get(profile, {})
