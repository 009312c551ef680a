"""An NVIDIA L4 that is not there, for Unsloth to find: its GPU trainer then runs on the CPU.

Without a GPU Unsloth leaves TRL's trainer as it is; with one it writes a GRPOTrainer of its own and
patches TRL. `import_unsloth` makes torch claim a GPU while that is decided. What is computed, and
where, stays the CPU's: kernels, memory, bitsandbytes' CUDA code and vLLM are not tried by this.
It needs triton and diffusers, which Unsloth imports on a GPU, and a process of its own.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

GIB = 2**30
L4 = SimpleNamespace(name="NVIDIA L4", major=8, minor=9, total_memory=24 * GIB)
L4.multi_processor_count, L4.gcnArchName, L4.warp_size, L4.uuid = 58, "", 32, "0"
L4.max_threads_per_multi_processor, L4.regs_per_multiprocessor = 1536, 65536
L4.shared_memory_per_block_optin, L4.L2_cache_size = 101_376, 48 * 2**20
CLAIMS = {
    "is_available": True,
    "is_initialized": False,
    "device_count": 1,
    "current_device": 0,
    "get_device_properties": L4,
    "get_device_capability": (8, 9),
    "get_device_name": L4.name,
    "is_bf16_supported": True,
    "mem_get_info": (20 * GIB, 24 * GIB),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved"), 0),
    **dict.fromkeys(("_lazy_init", "empty_cache", "synchronize", "reset_peak_memory_stats")),
}


def import_unsloth(compiled: Path) -> None:
    """Import Unsloth as on a GPU; then tensors are made on the CPU again, and its trainer stays.

    Args:
        compiled: A new folder, where Unsloth writes its trainers.
    """
    compiled.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(compiled))
    os.environ |= {"UNSLOTH_COMPILE_LOCATION": str(compiled), "UNSLOTH_COMPILE_DISABLE": "1"}
    os.environ |= {"UNSLOTH_DISABLE_STATISTICS": "1", "UNSLOTH_SKIP_TORCHVISION_CHECK": "1"}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "0"}
    import bitsandbytes  # noqa: F401  before the claims: it would load its CUDA library
    import torch

    for name, value in CLAIMS.items():
        setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    torch.version.cuda = "13.0"
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # torch's build for CPUs
        torch._C._cuda_getCurrentRawStream = lambda *_: 0
    import unsloth  # noqa: F401
    import UnslothGRPOTrainer as grpo
    import UnslothSFTTrainer as sft

    for module in (grpo, sft):
        module.DEVICE_TYPE_TORCH = "cpu"
        module.device_synchronize = lambda *_: None
    torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)


def claim_in(package: str) -> None:
    """Our own modules go on taking this for a GPU: what they decide by it is what is tried."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and hasattr(module, "cuda_available"):
            module.cuda_available = lambda: True
