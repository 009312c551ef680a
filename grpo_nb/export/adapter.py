"""The adapter as the training left it: sound, plain LoRA, and made for this base."""

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from grpo_nb.models.chat import find_model, hub_errors
from grpo_nb.runs import Run, atomic_path
from grpo_nb.runs.config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

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

    def added_to(self, weight: "Tensor") -> "Tensor":
        """The sum in the weight's dtype, rounded once."""
        up, down = self.up.to(weight.device).float(), self.down.to(weight.device).float()
        return (weight.float() + (up @ down) * self.scale).to(weight.dtype)


def read_adapter(folder: Path) -> dict[str, Delta]:
    """The adapter by the name of the weight it changes.

    Raises:
        FileNotFoundError: No adapter in the folder.
        ValueError: Damaged, not plain LoRA, not finite, or all zero, which is LoRA's initial state.
    """
    from safetensors.torch import load_file

    path = folder / "adapter_config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: run 03_train_grpo first")
    config = json.loads(path.read_text(encoding="utf-8"))
    special = [key for key in NOT_PLAIN if config.get(key)]
    if special or config.get("bias", "none") != "none" or config["peft_type"] != "LORA":
        raise ValueError(
            f"{path}: {', '.join(special) or config['peft_type']} is not plain LoRA, and the "
            "parity gate knows that alone: use peft's merge_and_unload, or train with plain LoRA"
        )
    scale = config["lora_alpha"] / config["r"] ** (0.5 if config["use_rslora"] else 1)
    with hub_errors(str(folder)):
        tensors = load_file(folder / "adapter_model.safetensors")
    ends = (".lora_A.weight", ".lora_B.weight")
    names = [key.removesuffix(ends[0]) for key in tensors if key.endswith(ends[0])]
    deltas = {
        f"{name.removeprefix('base_model.model.')}.weight": Delta(
            *(tensors[name + end] for end in ends), scale
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


def trained_paths(run: Run, config: RunConfig) -> tuple[str, str, Path | None]:
    """(base, policy, adapter) to load: where every weight was trained, there is no adapter."""
    adapter = run / "train/adapter"
    if config.policy.finetuning == "full":
        return config.model.model_path, str(adapter), None
    base = trained_base(config.model.model_path, adapter)
    return base, base, adapter


def copy_adapter(run: Run, config: RunConfig) -> Path:
    """Write model/adapter/: the adapter alone, checked, with its tokenizer."""
    source, target = run / "train/adapter", run / "model/adapter"
    read_adapter(source)
    trained_base(config.model.model_path, source)
    with atomic_path(target) as temporary:
        shutil.copytree(source, temporary)
    return target
