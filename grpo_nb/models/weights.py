"""Weights from disk: a base with or without its adapter, or into a policy that exists."""

import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb.models.chat import find_model, hub_errors, quiet
from grpo_nb.runs.files import read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from grpo_nb.models.policy import Policy


def cuda_available() -> bool:
    import torch

    return torch.cuda.is_available()


def has_bf16() -> bool:
    """Whether the GPU, or else the CPU, computes in bf16 itself, and does not emulate it slowly.

    Unsloth decides by the same, and a merged model has to compute as the policy did.
    """
    import torch

    if cuda_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    known = torch.cpu.get_capabilities()
    return any(known.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


def weights_dtype() -> "torch.dtype":
    """bf16 where that is computed in, else fp16 on a GPU and fp32 on a CPU."""
    import torch

    if has_bf16():
        return torch.bfloat16
    return torch.float16 if cuda_available() else torch.float32


def quantization_config(quantization: str) -> Any:
    """The 4-bit settings Unsloth uses, for transformers; None for 16-bit weights."""
    from transformers import BitsAndBytesConfig

    if quantization != "4bit":
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=weights_dtype(),
    )


def sharded() -> bool:
    """Whether the launcher spreads the weights over its processes: FSDP, or DeepSpeed ZeRO-3."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def load_base(model_path: str, quantization: str, **changes: Any) -> "PreTrainedModel":
    """The model as it lies on disk, or quantised, with plain transformers.

    Args:
        changes: Arguments of from_pretrained that take the place of ours, such as dtype.
    """
    from transformers import AutoModelForCausalLM

    # Its hint to install a faster kernel repeats in every process.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    gpu = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"  # each process of a launcher has its own
    asked = {
        "dtype": weights_dtype(),
        "use_safetensors": True,
        # Weights that are to be sharded need not fit on one GPU.
        "device_map": gpu if cuda_available() and not sharded() else "cpu",
    }
    # None would override what a checkpoint in 4 bit says of itself.
    if settings := quantization_config(quantization):
        asked["quantization_config"] = settings
    model = AutoModelForCausalLM.from_pretrained(find_model(model_path), **(asked | changes))
    for module in model.modules():
        # Otherwise bitsandbytes repacks the weights of some CPUs at the first forward.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def load_dequantized(model_path: str, quantization: str) -> "PreTrainedModel":
    """The base in bf16, with the weights that a policy of this quantization computes with."""
    import torch

    model = load_base(model_path, quantization, dtype=torch.bfloat16)
    if not hasattr(model.config, "quantization_config"):
        return model
    return dequantized(model)


def dequantized(model: "PreTrainedModel") -> "PreTrainedModel":
    """Return a 4-bit model with the weights that it computes with, in 16 or 32 bit."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    # On saving, transformers takes back what it did on reading, and fails at unpacking 4 bit.
    model._weight_conversions = [
        done
        for done in model._weight_conversions
        if not any(isinstance(one, Bnb4bitDeserialize) for one in getattr(done, "operations", []))
    ]
    with quiet():  # it says in which dtype
        return model.dequantize()


def unpacked(model: "PreTrainedModel") -> "PreTrainedModel":
    """On a CPU, dequantise a 4-bit model: each forward would do so again, for the same weights."""
    packed = getattr(model, "is_loaded_in_4bit", False) and not cuda_available()
    return dequantized(model) if packed else model


def load_checkpoint(
    model_path: str, *, adapter: Path | None, quantization: str
) -> "PreTrainedModel":
    """A model to judge, with plain transformers and peft.

    Args:
        model_path: Folder or hub name of the base, or of a merged model.
        adapter: Folder of the adapter that is added to it; None for the model as it is.
        quantization: "4bit" or "16bit".
    """
    with quiet(), hub_errors(model_path):
        model = unpacked(load_base(model_path, quantization))
        if adapter is not None:
            from peft import PeftModel

            with hub_errors(str(adapter)):
                model = PeftModel.from_pretrained(model, adapter)
    return model.eval()


def load_weights(policy: "Policy", folder: Path) -> None:
    """Put a saved adapter, or a saved full model, into the policy, in place.

    Args:
        policy: Its trainable weights are overwritten; a full model's all are.
        folder: Holds the safetensors, and an adapter's adapter_config.json.

    Raises:
        FileNotFoundError: No safetensors in `folder`.
        ValueError: Another base, other tensors or shapes, or another scale than the policy's.
    """
    import torch
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"{folder} holds no .safetensors: give the folder of a saved adapter or model"
        )
    saved = {name: tensor for file in files for name, tensor in load_file(file).items()}
    model = policy.model
    own = model.state_dict()
    if hasattr(model, "peft_config"):
        from peft import get_peft_model_state_dict

        own = get_peft_model_state_dict(model, save_embedding_layers=False)
        config, saved_config = model.peft_config["default"], _adapter_config(folder)
        trained_base(config.base_model_name_or_path, folder)
        if saved_config["r"] == config.r and saved_config["lora_alpha"] != config.lora_alpha:
            alpha = saved_config["lora_alpha"]
            raise ValueError(
                f"the adapter in {folder} has lora_alpha = {alpha}, the policy "
                f"{config.lora_alpha}: load the policy with model.lora_alpha = {alpha}"
            )
    _check_shapes(own, saved, folder)
    with torch.no_grad():
        for name, tensor in saved.items():
            own[name].copy_(tensor)


def trained_base(model_path: str, adapter: Path) -> str:
    """The base that the adapter was trained on.

    Asked for a 4-bit model of the hub, Unsloth may take its own 4-bit copy of it, whose
    weights are others than those bitsandbytes makes of the original.

    Raises:
        FileNotFoundError: No adapter in the folder.
        ValueError: The adapter was made for a base of another name.
    """
    trained = _adapter_config(adapter)["base_model_name_or_path"]
    names = [Path(path).name.lower() for path in (model_path, trained)]
    plain, theirs = (re.sub(r"(-unsloth)?-bnb-4bit$", "", name) for name in names)
    if plain != theirs:
        raise ValueError(
            f"the adapter in {adapter} was trained on {trained}, not on {model_path}: set "
            "model.model_path to its base, or train on this one"
        )
    return trained if names[0] != names[1] and names[1] != theirs else model_path


def _adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no adapter_config.json: it is not a saved adapter; run 03_train_grpo"
        )
    return read_json(path)


def _check_shapes(own: dict, saved: dict, folder: Path) -> None:
    """Refuse weights of which one tensor is missing, too much, or of another shape."""
    filled = {own[name].data_ptr() for name in saved.keys() & own.keys()}
    for name in sorted(own.keys() | saved.keys()):
        mine, theirs = (tuple(d[name].shape) if name in d else None for d in (own, saved))
        tied = theirs is None and own[name].data_ptr() in filled
        if mine != theirs and not tied:
            raise ValueError(
                f"{folder} does not fit the policy: {name} is "
                f"{theirs or 'missing'} there and {mine or 'missing'} here. Load the policy with "
                "the base, model.lora_rank and policy.finetuning that it was saved with"
            )
