"""Describe what a result depends on: the NVIDIA GPU, the environment, packages and the code.

Only the standard library is imported, because Colab's set-up uses this file before anything is
installed.
"""

import atexit
import gc
import os
import re
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "unsloth", "datasets")


def _output(*command: str) -> str:
    """Return what a command prints; "" if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout if result.returncode == 0 else ""


def _ask_nvidia(fields: str) -> list[str]:
    """Return nvidia-smi's report, one line per GPU; [] if nvidia-smi is missing or fails."""
    return _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines()


def gpu_name() -> str:
    """Return the name and memory of the first NVIDIA GPU, from nvidia-smi; "" if there is none."""
    return next(iter(_ask_nvidia("name,memory.total")), "")


def gpu_fault() -> str:
    """Return the reason why torch, built for CUDA 13, cannot use this GPU; "" if it can."""
    # CUDA 13.0's release notes require driver 580 or later, and a GPU from Turing (7.5) on.
    for field, least, what in (
        ("driver_version", 580, "the NVIDIA driver"),
        ("compute_cap", 7.5, "the compute capability of this GPU,"),
    ):
        version = re.match(r"\d+(\.\d+)?", next(iter(_ask_nvidia(field)), ""))
        if version and float(version[0]) < least:
            return f"{what} {version[0]} is too old: CUDA 13 needs {least} or later"
    return ""


def limit_spinning() -> None:
    """Let waiting threads of torch sleep after about 10 µs, here and in child processes.

    By default libgomp's threads spin for milliseconds, which takes CPU time from other processes.
    If they slept at once, a step of a small model would take 1.6 times as long: see
    docs/performance.md. Variables that the user has set are kept. libgomp reads them when torch is
    imported.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


@cache
def skip_garbage_at_exit() -> None:
    """Skip the final garbage collection when Python exits; it takes 2 s with torch and Unsloth."""
    atexit.register(gc.freeze)


def bound_kernels() -> None:
    """Let oneDNN cache kernels for only a few matrix shapes, unless the user has set a number.

    In bf16, each training step has new shapes, and oneDNN keeps 1024 kernels by default: see
    docs/performance.md. oneDNN reads the variable when it creates its first kernel.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")


def installed_versions() -> dict[str, str]:
    """Return the versions of the packages that a result depends on, without importing them."""
    versions = dict.fromkeys(PACKAGES, "not installed")
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def git_commit() -> str:
    """Return the project's commit, with "-dirty" after changes; "unknown" outside a checkout."""
    options = ("--always", "--abbrev=40", "--exclude=*", "--dirty")  # no tags
    return _output("git", "-C", str(PROJECT_ROOT), "describe", *options).strip() or "unknown"
