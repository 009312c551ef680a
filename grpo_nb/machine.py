"""What this machine has: its NVIDIA GPU, by nvidia-smi, and what the environment says.

Nothing but Python's own library: Colab's set-up asks before anything is installed.
"""

import os
import re
import shutil
import subprocess


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


def several_gpus() -> str:
    """What to do where a process sees several GPUs, of which Unsloth trains on one; else ""."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(_ask_nvidia("name")) if visible is None else len(visible.split(","))
    return f"{count} GPUs are visible: for Unsloth export CUDA_VISIBLE_DEVICES=0" * (count > 1)


def gpu_in_use() -> str:
    """The GPU's name and memory, if this process may use it; else ""."""
    return "" if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") else gpu_name()


def switches() -> dict[str, str]:
    """What the environment tells Unsloth and vLLM, which changes a training; secrets left out."""
    names = [name for name in os.environ if name.startswith(("UNSLOTH_", "VLLM_"))]
    secret = re.compile("KEY|TOKEN|SECRET|PASSW")
    return {n: "(secret)" if secret.search(n) else os.environ[n] for n in sorted(names)}
