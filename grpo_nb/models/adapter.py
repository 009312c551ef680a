"""Choose the weights that a LoRA adapter trains, and find the base of a saved adapter."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from grpo_nb.files import read_json
from grpo_nb.names import refuse_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Weights(NamedTuple):
    """Hold the names that a model's linear layers and experts have without an adapter.

    layers: Linear layers of the decoder.
    experts: Weights of experts that are stacked in one tensor.
    vision: Linear layers of the vision tower; trained only if `lora.finetune_vision_layers` is set.
    others: Linear layers that are never trained: routers, and mamba's `out_proj`. The fused
        kernel of `out_proj` bypasses an adapter, and peft refuses to adapt it, too.
    """

    layers: list[str]
    experts: list[str]
    vision: list[str]
    others: list[str]


def trainable_weights(model: "PreTrainedModel") -> Weights:
    """Group a model's linear layers and experts; leave out its head and any adapter."""
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
    return Weights(layers, experts, vision, others)


def name_layers(
    model: "PreTrainedModel", lora_arguments: Mapping[str, Any], vision_tower: bool = False
) -> dict[str, Any]:
    """Return the arguments with `target_modules` and `target_parameters` by name.

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


def adapter_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a saved adapter.

    Raises:
        FileNotFoundError: The folder contains no adapter.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} holds no adapter_config.json: it is not a saved adapter; run 03_train_grpo"
        )
    return read_json(path)


def trained_base(model_path: str, adapter: Path) -> str:
    """Return the base that an adapter was trained on.

    For a 4-bit model from the hub, Unsloth may load its own quantized copy. The weights of the copy
    differ from those that bitsandbytes computes from the original.

    Raises:
        FileNotFoundError: The folder contains no adapter.
        ValueError: The adapter was trained on a base with another name.
    """
    base = adapter_config(adapter)["base_model_name_or_path"]
    model_name, base_name = Path(model_path).name.lower(), Path(base).name.lower()
    copy = re.compile(r"(-unsloth)?-bnb-4bit$")
    if copy.sub("", model_name) != copy.sub("", base_name):
        raise ValueError(
            f"the adapter in {adapter} was trained on {base}, not on {model_path}: set "
            "model.model_name to its base, or train on this one"
        )
    is_other_copy = model_name != base_name and copy.search(base_name)
    return base if is_other_copy else model_path
