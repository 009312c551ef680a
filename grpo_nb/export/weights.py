"""The merged weights, one tensor at a time: base, as it was kept in training, plus adapter."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_nb.chat import find_model, hub_errors, quiet
from grpo_nb.models import cuda_available, quantization_config
from grpo_nb.runs import write_json

if TYPE_CHECKING:
    from bitsandbytes.nn import Params4bit
    from torch import Tensor
    from transformers import PreTrainedModel

INDEX = "model.safetensors.index.json"
STATE = ".quant_state.bitsandbytes__nf4"  # ends the name of what a 4-bit checkpoint adds
# What changes a weight by more than scale * B @ A; "none" and False are the plain case.
NOT_PLAIN = (
    *("use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern"),
    *("alpha_pattern", "target_parameters", "trainable_token_indices", "layer_replication"),
)


class Delta(NamedTuple):
    """What LoRA adds to a weight: scale * up @ down; up [out, rank], down [rank, in]."""

    down: "Tensor"
    up: "Tensor"
    scale: float

    @property
    def shape(self) -> list[int]:
        return [self.up.shape[0], self.down.shape[1]]

    def on(self, device: str) -> "Tensor":
        """The product, [out, in], float32."""
        up, down = self.up.to(device).float(), self.down.to(device).float()
        return (up @ down) * self.scale


def read_adapter(folder: Path) -> dict[str, Delta]:
    """The adapter by the name of the weight it changes.

    Raises:
        FileNotFoundError: No adapter in the folder.
        ValueError: Not plain LoRA, not finite, or all zero, which is LoRA's initial state.
    """
    from safetensors.torch import load_file

    path = folder / "adapter_config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run 03_train_grpo first")
    config = json.loads(path.read_text(encoding="utf-8"))
    special = [key for key in NOT_PLAIN if config.get(key)]
    if special or config.get("bias", "none") != "none" or config["peft_type"] != "LORA":
        raise ValueError(
            f"{path}: {', '.join(special) or config['peft_type']} is not plain LoRA, and only "
            "that is merged here: use peft's merge_and_unload, or train with plain LoRA"
        )
    rank = math.sqrt(config["r"]) if config["use_rslora"] else config["r"]
    tensors = load_file(folder / "adapter_model.safetensors")
    ends = (".lora_A.weight", ".lora_B.weight")
    names = [key.removesuffix(ends[0]) for key in tensors if key.endswith(ends[0])]
    deltas = {
        name.removeprefix("base_model.model.") + ".weight": Delta(
            *(tensors[name + end] for end in ends), config["lora_alpha"] / rank
        )
        for name in names
    }
    broken = [name for name, d in deltas.items() if not (d.up.sum() + d.down.sum()).isfinite()]
    if broken:
        raise ValueError(f"the adapter has NaN or inf in {', '.join(broken[:3])}: train again")
    if not any(d.up.any() for d in deltas.values()):
        raise ValueError(
            "the adapter is all zero (every B is as LoRA begins), so that it is the base: see "
            "train/metrics.jsonl, whose rewards or gradients were 0, and train again"
        )
    return deltas


def trained_base(model_path: str, adapter: Path) -> str:
    """The base that the adapter was trained on.

    Asked for a 4-bit model of the hub, Unsloth may take its own 4-bit copy of it, whose
    weights are others than those bitsandbytes makes of the original.

    Raises:
        ValueError: The adapter was made for a base of another name.
    """
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    named = config["base_model_name_or_path"]
    trained, given = Path(named).name.lower(), Path(find_model(model_path)).name.lower()
    if trained == given:
        return model_path
    if trained.startswith(given) and trained.endswith("bnb-4bit"):
        return named
    raise ValueError(
        f"the adapter was made for the base {named!r}, and model.model_path is {model_path!r}: "
        "give that base, or train on this one"
    )


class Base:
    """The base's checkpoint, read one tensor at a time.

    Args:
        model_path: Folder or hub name.

    Raises:
        FileNotFoundError: No safetensors there.
    """

    def __init__(self, model_path: str) -> None:
        from safetensors import safe_open

        found = find_model(model_path)
        if not Path(found).is_dir():
            with hub_errors(model_path):
                from huggingface_hub import snapshot_download

                found = snapshot_download(found, allow_patterns=["*.json", "*.safetensors"])
        self.folder = Path(found)
        self.device = "cuda" if cuda_available() else "cpu"
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise FileNotFoundError(
                f"{self.folder} holds no *.safetensors: load the base with transformers and save "
                "it again with model.save_pretrained(folder)"
            )
        files = [safe_open(path, framework="pt") for path in paths]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118
        # What the checkpoint itself keeps in 4 bit, and lays beside it (x.weight.absmax …).
        self.packed = {n.removesuffix(STATE) for n in self._files if n.endswith(STATE)}
        self.names = [n for n in self._files if n.rpartition(".")[0] not in self._packed_states()]

    def _packed_states(self) -> set[str]:
        return self.packed | {f"{name}.quant_state" for name in self.packed}

    @cached_property
    def model(self) -> "PreTrainedModel":
        """The architecture, without weights."""
        with quiet():
            import torch
            from transformers import AutoConfig, AutoModelForCausalLM

            config = AutoConfig.from_pretrained(self.folder)
            config.__dict__.pop("quantization_config", None)
            config.dtype = torch.bfloat16
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    @cached_property
    def quantizable(self) -> set[str]:
        """Weights that transformers keeps in 4 bit where it loads a 16-bit checkpoint so."""
        import torch
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        skipped = HfQuantizer.get_modules_to_not_convert(self.model)
        modules = self.model.named_modules()
        linear = [name for name, module in modules if isinstance(module, torch.nn.Linear)]
        return {f"{name}.weight" for name in linear if should_convert_module(name, skipped)}

    def read(self, name: str, as_4bit: bool) -> "Tensor":
        """A tensor in 16 bit.

        Args:
            as_4bit: Give the weight as a 4-bit model has it: quantised and dequantised.
        """
        import torch

        tensor = self._files[name].get_tensor(name)
        if name in self.packed:
            from bitsandbytes.nn import Params4bit

            states = [n for n in self._files if n.startswith(f"{name}.")]
            state = {n: self._files[n].get_tensor(n) for n in states}
            weight = Params4bit.from_prequantized(tensor, state, device=self.device)
            return _dequantized(weight).to(torch.bfloat16)
        tensor = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
        if as_4bit and name in self.quantizable:
            return _dequantized(quantized(tensor, self.device))
        return tensor


def quantized(tensor: "Tensor", device: str) -> "Params4bit":
    """The weight in 4 bit, with the settings of training."""
    from bitsandbytes.nn import Params4bit

    settings = quantization_config("4bit")
    return Params4bit(
        tensor.contiguous(),
        requires_grad=False,
        quant_type=settings.bnb_4bit_quant_type,
        compress_statistics=settings.bnb_4bit_use_double_quant,
    ).to(device)


def _dequantized(weight: "Params4bit") -> "Tensor":
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, weight.quant_state)


def merged_tensors(
    base: Base, adapter: Mapping[str, Delta], mode: str, quantization: str
) -> "Iterator[tuple[str, Tensor]]":
    """Name and weight of each tensor of the merged model, in the order of the base's files.

    Args:
        mode: Of settings.MergeMode.
        quantization: How the base was kept in training: "4bit" or "16bit".

    Raises:
        ValueError: The adapter does not fit this base, or a mode that it cannot give.
    """
    if mode == "merged_16bit_original_base" and base.packed:
        raise ValueError(
            f"{base.folder} holds 4-bit weights, no original in 16 bit: set export.merge to "
            "merged_16bit, or model.model_path to the original"
        )
    strange = [n for n in adapter if n not in base.names]
    if strange:
        raise ValueError(
            f"the adapter changes {len(strange)} weights that the base {base.folder} does not "
            f"have, such as {strange[0]}: it was made for another base"
        )
    for name in base.names:
        tensor = base.read(name, quantization == "4bit" and mode != "merged_16bit_original_base")
        if name in adapter:
            delta = adapter[name]
            if delta.shape != list(tensor.shape):
                raise ValueError(
                    f"{name} is {list(tensor.shape)} in the base {base.folder} and "
                    f"{delta.shape} in the adapter: it was made for another base"
                )
            tensor = (tensor.to(base.device).float() + delta.on(base.device)).to(tensor.dtype)
        if mode == "merged_4bit" and name in base.quantizable:
            weight = quantized(tensor, base.device)
            yield name, weight.data.cpu()
            states = weight.quant_state.as_dict(packed=True)
            yield from ((f"{name}.{key}", state.cpu()) for key, state in states.items())
        else:
            yield name, tensor.cpu()


def write_shards(
    tensors: "Iterable[tuple[str, Tensor]]", folder: Path, max_shard_bytes: float
) -> None:
    """model-00001-of-….safetensors and their index, or one model.safetensors if all fit.

    One shard is held in memory at a time.
    """
    from safetensors.torch import save_file

    places: dict[str, int] = {}
    held: dict[str, Tensor] = {}
    count, size, total = 0, 0, 0

    def flush() -> None:
        nonlocal count, size
        save_file(held, folder / f"shard-{count}", metadata={"format": "pt"})
        held.clear()
        count, size = count + 1, 0

    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_shard_bytes:
            flush()
        held[name], places[name] = tensor.contiguous(), count
        size, total = size + tensor.nbytes, total + tensor.nbytes
    flush()
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"shard-{number}").rename(folder / name)
    if count > 1:
        weight_map = {name: names[number] for name, number in places.items()}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
