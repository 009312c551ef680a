"""An NVIDIA L4 that is not there, for Unsloth to find: its GPU trainer then runs on the CPU.

Without a GPU Unsloth leaves TRL's trainer as it is; with one it writes a GRPOTrainer of its own and
patches TRL. `import_unsloth` makes torch claim a GPU while that is decided. What is computed, and
where, stays the CPU's: kernels, memory and bitsandbytes' CUDA code are not tried by this.
It needs triton and diffusers, which Unsloth imports on a GPU, and a process of its own.

`load_policy` goes further: Unsloth's own loader starts vLLM, the pinned version in its build for
CPUs, and shares its weights with it. `vllm_scenarios.py` says how to install that build.
"""

import json
import os
import sys
import time
import traceback
from contextlib import contextmanager
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

SETTINGS = {
    "grpo.optim": "adamw_torch",  # in 8 bit it is a GPU's
    "train.eval_steps": 0,
    "grpo.gradient_accumulation_steps": 1,
    "grpo.save_steps": 2,
    "grpo.warmup_steps": 0,
    "grpo.bf16": False,
    "grpo.fp16": False,
}


def report(folder: Path, scenarios, *shared) -> None:
    """Write folder/report.json: {scenario: what came of it, or {"error": its traceback}}."""
    found = {}
    for scenario in scenarios:
        began, name = time.monotonic(), scenario.__name__
        try:
            found[name] = scenario(*shared)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        print(name, round(time.monotonic() - began), "s", file=sys.stderr, flush=True)
    (folder / "report.json").write_text(json.dumps(found), encoding="utf-8")


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
    from transformers import training_args
    from unsloth_zoo import device_type

    for module in (grpo, sft):
        module.DEVICE_TYPE_TORCH = "cpu"
        module.device_synchronize = lambda *_: None
    torch.cuda.is_available, torch.cuda.device_count = (lambda: False), (lambda: 0)
    # An L4 trains in bf16. Without this, Unsloth takes fp16, which is eight times slower on a CPU.
    bf16 = lambda: CLAIMS["is_bf16_supported"]  # noqa: E731
    device_type.device_is_bf16_supported = training_args.is_torch_bf16_gpu_available = bf16


def claim_in(package: str, there: bool = True) -> None:
    """Let our own modules go on taking this for a GPU: what they decide by it is what is tried."""
    for name, module in list(sys.modules.items()):
        if name.startswith(package) and hasattr(module, "cuda_available"):
            module.cuda_available = lambda: there


@contextmanager
def claims():
    """Make torch claim the GPU, where Unsloth's loader asks for it again."""
    import torch

    before = {name: getattr(torch.cuda, name) for name in CLAIMS}
    for name, value in CLAIMS.items():
        if name != "is_available":
            setattr(torch.cuda, name, lambda *_, _value=value, **__: _value)
    yield
    for name, function in before.items():
        setattr(torch.cuda, name, function)


def prepare_loader() -> None:
    """Let Unsloth's loader put its tensors on the CPU, and start vLLM's build for CPUs."""
    import torch
    import unsloth.models._utils as utils
    import unsloth.models.llama as llama
    import unsloth_zoo.vllm_utils as zoo

    cpu = torch.device("cpu")
    for name, module in list(sys.modules.items()):
        if name.startswith(("unsloth.", "unsloth_zoo.")) and hasattr(module, "DEVICE_TYPE_TORCH"):
            module.DEVICE_TYPE_TORCH = "cpu"
    utils.patch_unsloth_smart_gradient_checkpointing = lambda *_, **__: None
    llama.get_current_device = zoo.get_target_device = lambda *_, **__: cpu
    zoo.patch_vllm(debug=False)
    zoo.load_vllm = start_vllm


def start_vllm(model_name, max_seq_length, max_lora_rank, **_):
    """Start the engine with what Unsloth asks for, as far as a CPU has it."""
    import torch
    import unsloth_zoo.vllm_utils as zoo
    import vllm.model_executor.layers.utils as layers
    from vllm import LLM

    # The packed weights that vLLM makes for a CPU could not be shared with the policy.
    plain = torch.nn.functional.linear
    pack = "dispatch_cpu_unquantized_gemm"
    setattr(layers, pack, lambda layer, remove_weight: setattr(layer, "cpu_linear", plain))
    llm = LLM(
        model=model_name,
        dtype="bfloat16",
        enable_lora=True,
        max_lora_rank=zoo.determine_max_lora_rank(max_lora_rank),
        max_loras=1,
        max_model_len=max_seq_length,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_logprobs=0,
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        seed=0,
    )
    llm.approx_max_num_seqs = 64
    return llm


def load_policy(config):
    """Load a policy with `models.load_policy`, by Unsloth's loader for GPUs and with vLLM.

    Unsloth's kernels are a GPU's: the forward that trains is then transformers' own.
    """
    from grpo_nb import models

    claim_in("grpo_nb.models")
    with claims():
        loaded = models.load_policy(config)
    claim_in("grpo_nb.models", there=False)
    plain_forward(loaded.model)
    return loaded


def plain_forward(model) -> None:
    """Give a model transformers' own forward again: Unsloth has replaced parts of its classes."""
    base = model.get_base_model()
    replaced, _ = sys.modules[type(base).__module__]._unsloth_pre_patch_originals
    (rotary,) = [kind for name, kind in replaced.items() if name.endswith("RotaryEmbedding")]
    base.model.rotary_emb = rotary(base.config)
    for module in model.modules():
        module._unsloth_fast_path = False
        vars(module).pop("forward", None)
