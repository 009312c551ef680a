"""Load a base and its adapter in the precision that suits the machine; choose what LoRA trains."""

import logging
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.files import read_json
from grpo_nb.models import hub
from grpo_nb.names import refuse_unknown

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"


def cuda_available() -> bool:
    """Return whether torch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def has_bf16() -> bool:
    """Return whether the GPU, or else the CPU, computes in bf16 without slow emulation.

    Unsloth uses the same rule. A merged model must compute in the same precision as the policy.
    On a CPU, oneDNN computes in bf16, and ONEDNN_MAX_CPU_ISA=AVX2 keeps it from doing so.
    """
    import torch

    if cuda_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    features = torch.cpu.get_capabilities()
    native = any(features.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return native and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def weights_dtype() -> "torch.dtype":
    """Return bf16 if the machine computes in it, else fp16 on a GPU and fp32 on a CPU."""
    import torch

    if has_bf16():
        return torch.bfloat16
    return torch.float16 if cuda_available() else torch.float32


def use_torch_head() -> None:
    """Make TRL 1.15 compute its fused LM head in torch if there is no GPU, as Unsloth does.

    The kernel of TRL 1.15 needs a GPU; that of TRL 1.16 does not, and is left as it is. Unsloth's
    function is loaded from its file, which imports torch alone, because importing Unsloth's package
    would change TRL in other ways, too.
    """
    package = find_spec("unsloth_zoo")
    is_needed = version("trl").startswith("1.15.") and "unsloth" not in sys.modules
    if is_needed and package and not cuda_available():
        file = Path(package.origin).parent / "cpu/ops.py"
        spec = spec_from_file_location("unsloth_zoo_cpu_ops", file)
        operations = module_from_spec(spec)
        spec.loader.exec_module(operations)
        operations.patch_trl_fused_lm_head()


def sharded() -> bool:
    """Return whether the launcher shards the weights: by FSDP, or by DeepSpeed ZeRO-3."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def load_base(model_path: str, quantization: str, **changes: Any) -> "PreTrainedModel":
    """Load a model with plain transformers.

    Args:
        model_path: Folder or hub name.
        quantization: "4bit", or "16bit" for no quantization beyond that of the checkpoint.
        changes: Arguments of from_pretrained that replace ours, such as dtype.
    """
    from transformers import BitsAndBytesConfig

    # Otherwise every process prints bitsandbytes' hint to install a faster kernel.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # each launched process has its own GPU
    arguments = {
        "dtype": weights_dtype(),
        "use_safetensors": True,
        # Weights that will be sharded need not fit on one GPU.
        "device_map": gpu if cuda_available() and not sharded() else "cpu",
    }
    if quantization == "4bit":  # with Unsloth's settings; a 4-bit checkpoint has its own
        arguments["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=weights_dtype(),
        )
    path = hub.find_model(model_path)
    hub.hide_bars()
    model = hub.auto_class(hub.read_config(path)).from_pretrained(path, **arguments | changes)
    never_sample_images(model)
    return model


def never_sample_images(model: "PreTrainedModel") -> None:
    """Keep this model's `generate` from sampling image tokens, even when TRL calls it."""
    if tokens := hub.image_tokens(model.config):
        model.generation_config.suppress_tokens = tokens


def load_dequantized(model_path: str, quantization: str) -> "PreTrainedModel":
    """Load a base in bf16, with the weight values that a policy of this quantization uses."""
    import torch

    model = load_base(model_path, quantization, dtype=torch.bfloat16)
    return dequantized(model) if hasattr(model.config, "quantization_config") else model


def dequantized(model: "PreTrainedModel") -> "PreTrainedModel":
    """Unpack a 4-bit model into the 16-bit or 32-bit weights that it computes with."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse as as_before
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    for weight in model.parameters():  # in its first forward pass, a CPU with bf16 reorders them
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            weight.data, weight.quant_state = as_before(weight.data, weight.quant_state)
    # On saving, transformers reverses the conversions of loading, which fails for 4-bit weights.
    model._weight_conversions = [
        conversion
        for conversion in model._weight_conversions
        if not any(
            isinstance(operation, Bnb4bitDeserialize)
            for operation in getattr(conversion, "operations", [])
        )
    ]
    with hub.quiet():  # transformers prints the dtype
        return model.dequantize()


def unpacked(model: "PreTrainedModel") -> "PreTrainedModel":
    """Dequantise a 4-bit model if there is no GPU, and return the model.

    Otherwise a CPU would dequantise it in every forward pass.
    """
    is_packed = getattr(model, "is_loaded_in_4bit", False) and not cuda_available()
    return dequantized(model) if is_packed else model


@contextmanager
def adapter_in_fp32(model: Any) -> Iterator[None]:
    """Keep the adapter in fp32 while a trainer is built.

    TRL casts the adapter of a 4-bit model to bf16. An earlier trainer with `beta` above 0 has added
    an adapter "ref", which is removed here, because TRL refuses a second one.
    """
    import torch

    if "ref" in getattr(model, "peft_config", {}):
        model.delete_adapter("ref")
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    whole = [weight.data.to(torch.float32) for weight in trained]
    yield
    for weight, data in zip(trained, whole, strict=True):
        weight.data = data


def load_checkpoint(
    model_path: str, *, adapter: Path | None, quantization: str
) -> "PreTrainedModel":
    """Load a model that will not be trained, with plain transformers and peft.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter to load; None for the model alone.
        quantization: "4bit" or "16bit".
    """
    with hub.quiet():
        model = unpacked(load_base(model_path, quantization))
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
    return model.eval().requires_grad_(False)


def trainable_weights(model: "PreTrainedModel") -> tuple[list[str], ...]:
    """Group the names of a model's linear layers and experts, as they are without an adapter.

    The head is left out.

    Returns:
        The linear layers of the decoder; weights of experts that are stacked in one tensor; linear
        layers of the vision tower; and linear layers that are never trained: routers, and mamba's
        `out_proj`. The fused kernel of `out_proj` bypasses an adapter, and peft refuses it, too.
    """
    from torch.nn import Linear

    decoder = {*model.get_decoder().modules()}
    mamba = {m.out_proj for m in decoder if hasattr(m, "A_log") and hasattr(m, "in_proj")}
    layers, vision, others = [], [], []
    for name, module in model.named_modules():
        name = name.removesuffix(".base_layer")
        is_head = module is model.get_output_embeddings()
        if is_head or not isinstance(module, Linear) or ".lora_" in name:
            continue
        is_other = module in mamba or leaf(name) in ("gate", "router")
        group = vision if module not in decoder else others if is_other else layers
        group.append(name)
    stacks = [name for name, _ in model.named_parameters() if ".experts." in name]
    experts = [name for name in stacks if not name.endswith((".weight", "bias"))]
    experts = [name.replace(".base_layer", "") for name in experts]
    return layers, experts, vision, others


def name_layers(
    model: "PreTrainedModel", lora_arguments: Mapping[str, Any], vision_tower: bool = False
) -> dict[str, Any]:
    """Return LoRA arguments whose `target_modules` and `target_parameters` are lists of names.

    Args:
        model: The base, without an adapter.
        lora_arguments: Arguments of peft's LoraConfig, or of Unsloth's `get_peft_model`;
            `target_modules` is "all-linear", or names such as "q_proj, v_proj".
        vision_tower: Whether the part that reads images gets an adapter, too.

    Raises:
        ValueError: `target_modules` names a layer that the model does not have, or `vision_tower`
            is set for a text-only model.
    """
    layers, experts, vision, others = trainable_weights(model)
    if (names := lora_arguments["target_modules"]) != "all-linear":
        targets = names.replace(" ", "").split(",")
        leaves = sorted({leaf(name) for name in layers + experts})
        for target in targets:
            refuse_unknown("lora.target_modules", target, leaves)
        layers = [name for name in layers if leaf(name) in targets]
        experts = [name for name in experts if leaf(name) in targets]
    if vision_tower and not vision:
        why = f"{model.name_or_path} has no part that reads images"
        raise ValueError(f"lora.finetune_vision_layers = true: {why}; leave the setting out")
    (layers if vision_tower else others).extend(vision)
    leaves = {leaf(name) for name in layers}
    # A leaf matches all modules whose names end with it; some in a vision tower are not linear.
    ambiguous = vision_tower or leaves & {leaf(name) for name in others}
    return {
        **lora_arguments,
        "target_modules": layers if ambiguous else sorted(leaves),
        "target_parameters": experts or None,
    }


def leaf(name: str) -> str:
    """Return the last part of a layer's name."""
    return name.rpartition(".")[2]


def trained_base(model_path: str, adapter: Path) -> str:
    """Return the base that an adapter was trained on.

    For a 4-bit model from the hub, Unsloth may load its own quantized copy. Then the name of the
    copy is returned, because its weights differ from those that bitsandbytes computes from the
    original.

    Raises:
        FileNotFoundError: The folder contains no adapter.
        ValueError: The adapter was trained on a base with another name.
    """
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise FileNotFoundError(
            f"{adapter} holds no {ADAPTER_CONFIG}: give the folder of an adapter, such as "
            "outputs/checkpoint-250; after full fine-tuning the checkpoint is the model"
        )
    base = read_json(adapter / ADAPTER_CONFIG)["base_model_name_or_path"]
    model_name, base_name = Path(model_path).name.lower(), Path(base).name.lower()
    copy = re.compile(r"(-unsloth)?-bnb-4bit$")
    if copy.sub("", model_name) != copy.sub("", base_name):
        raise ValueError(
            f"the adapter in {adapter} was trained on {base}, not on {model_path}: set "
            "model.model_name to its base, or train on this one"
        )
    is_other_copy = model_name != base_name and copy.search(base_name)
    return base if is_other_copy else model_path
