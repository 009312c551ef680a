"""Merge the adapter into its base, and put the result in place only if it passes a parity gate."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import data
from grpo_nb.checks import Check
from grpo_nb.export import parity
from grpo_nb.files import atomic_path, read_json, write_json
from grpo_nb.models import (
    cuda_available,
    free_memory,
    load_checkpoint,
    load_dequantized,
    load_tokenizer,
    trained_base,
)
from grpo_nb.models.hub import find_model, hub_errors, quiet
from grpo_nb.models.vision import auto_class, copy_processor, read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import RunConfig

MERGED = "model/merged"


def merge(stage: "Stage", *, force: bool = False) -> tuple[Path, Check]:
    """Write model/merged and model/parity.json, and record the check "merge".

    The adapter is merged into the base in the precision used in training (a 4-bit base is
    dequantised), because this is the policy that was rewarded. The result is written to a temporary
    folder and tested there. It replaces model/merged only if it passes. The 16-bit weights need
    room in memory, on the GPU if there is one; their size is printed.

    Args:
        stage: Stage 04 of a trained run.
        force: Whether to put the model in place even if it fails the gate.

    Returns:
        The folder (safetensors, tokenizer, chat template, generation config), and the check.

    Raises:
        ValueError: The adapter belongs to another base or is all zero, or the merge fails the
            gate.
        RuntimeError: There is not enough memory or disk space.
    """
    run, config = stage.run, stage.config
    folder, adapter = run / MERGED, run / "train/adapter"
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover)  # left by a killed merge; the run's lock excludes a running one
    base, policy, adapter = trained_paths(run, config)
    names = [] if adapter is None else adapted_modules(adapter)
    _refuse_without_room(_size(policy, names), folder)
    with atomic_path(folder) as temporary:
        _write(_merged(policy, adapter, config.model.quantization), config, temporary)
        free_memory()
        figures = {} if adapter is None else _compare(run, config, base, temporary)
        check = parity.verdict(figures)
        report = {"base": base, "base in training": config.model.quantization, **figures}
        write_json(run / "model/parity.json", {"passed": check.state == "ok", **report})
        stage.record_checks([check])
        if check.state != "ok" and not force:
            raise ValueError(
                f"the merged model fails the parity gate ({check.evidence}) and is not put in "
                f"place. {check.fix}. force = True exports it anyway"
            )
    return folder, check


def trained_paths(run: "Run", config: "RunConfig") -> tuple[str, str, Path | None]:
    """Return (base, policy, adapter) to load; after full fine-tuning the adapter is None.

    Raises:
        FileNotFoundError: The run has not been trained.
    """
    adapter = run / "train/adapter"
    if not adapter.is_dir():
        raise FileNotFoundError(f"run {run.name!r} holds no train/adapter: run 03_train_grpo first")
    if config.policy.finetuning == "full":
        return config.model.model_path, str(adapter), None
    base = trained_base(config.model.model_path, adapter)
    return base, base, adapter


def adapted_modules(adapter: Path) -> list[str]:
    """Return the names of the base's modules that the adapter changes.

    Raises:
        FileNotFoundError: There is no adapter in the folder.
        ValueError: The adapter is damaged, not finite, or all zero, as after initialization.
    """
    from safetensors.torch import load_file

    with hub_errors(str(adapter)):
        tensors = load_file(adapter / "adapter_model.safetensors")
    if faults := [name for name, tensor in tensors.items() if not tensor.sum().isfinite()]:
        raise ValueError(
            f"NaN or inf in the adapter's {faults[0]}: train again with a lower train.learning_rate"
        )
    if not any(tensor.any() for name, tensor in tensors.items() if ".lora_B." in name):
        raise ValueError(
            "the adapter is all zero (every B still has LoRA's initial value), so it equals the "
            "base: see in train/metrics.jsonl why rewards or gradients were 0, and train again"
        )
    layers = {name.partition(".lora_B.")[0] for name in tensors if ".lora_B." in name}
    return sorted({parity.plain_name(layer) for layer in layers})


def _merged(policy: str, adapter: Path | None, quantization: str) -> "PreTrainedModel":
    if adapter is None:
        return load_checkpoint(policy, adapter=None, quantization="16bit")
    with quiet(), hub_errors(policy):
        model = load_dequantized(policy, quantization)
    from peft import PeftModel  # late: it imports bitsandbytes, whose messages are off by now

    with hub_errors(str(adapter)):
        tuned = PeftModel.from_pretrained(model, adapter)
    _add_changes(tuned)
    return tuned.unload()


def _add_changes(tuned: "PreTrainedModel") -> None:
    """Add the adapter's change to the weights that it adapts, with stochastic rounding.

    The base's weights are bf16 numbers. Rounding to the nearest, as peft does, loses every change
    of less than half a step: up to 90 % of a small update. Stochastic rounding is correct on
    average, so no part of the update is lost: see docs/figures.md.
    """
    import torch
    from peft.tuners.lora import LoraLayer

    generator = torch.Generator(tuned.device).manual_seed(0)
    for layer in [module for module in tuned.modules() if isinstance(module, LoraLayer)]:
        weight = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
        with torch.no_grad():
            exact = weight.float() + layer.get_delta_weight("default")
            # bf16 is fp32 without its last 16 bits. A random number added there may carry over.
            chance = {"dtype": torch.int32, "device": exact.device, "generator": generator}
            bits = exact.view(torch.int32) + torch.randint(2**16, exact.shape, **chance)
            weight.copy_(bits.bitwise_and_(-(2**16)).view(torch.float32))


def _write(model: "PreTrainedModel", config: "RunConfig", folder: Path) -> None:
    """Write weights, config, generation config, tokenizer and chat template to a new folder."""
    with quiet():
        model.save_pretrained(folder, max_shard_size="5GB")
    tokenizer = load_tokenizer(config.model.model_path, config.model.chat_template_kwargs)
    tokenizer.save_pretrained(folder)
    copy_processor(find_model(config.model.model_path), folder)


def _compare(run: "Run", config: "RunConfig", base: str, folder: Path) -> dict[str, Any]:
    """Compare the adapter on its base with the merged files, in weights and on prompts."""
    merged_path = str(folder.resolve())
    prompts = [row["prompt"] for row in data.load(run, "eval")[: config.export.parity_prompts]]
    sampling = {"max_completion_length": config.train.max_completion_length}
    quantization = config.model.quantization
    try:
        return parity.compare(
            load_checkpoint(base, adapter=run / "train/adapter", quantization=quantization),
            load_checkpoint(merged_path, adapter=None, quantization="16bit"),
            load_tokenizer(merged_path),
            prompts,
            sampling | {"batch_size": config.evaluate.eval_batch_size},
        )
    finally:
        free_memory()  # both models are gone before the next engine is loaded


def refuse_incomplete(folder: Path) -> Path:
    """Return the folder if it holds a complete model.

    Raises:
        FileNotFoundError: A file is missing, for example after a killed write.
    """
    index = folder / "model.safetensors.index.json"
    shards = read_json(index)["weight_map"].values() if index.exists() else ["model.safetensors"]
    names = sorted({"config.json", "tokenizer_config.json", *shards})
    if missing := [name for name in names if not (folder / name).exists()]:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: the model is incomplete. Run "
            "04_merge_and_infer (--from 04) again"
        )
    return folder


def _size(model_path: str, modules: list[str]) -> int:
    """Return the size of the merged weights [bytes], without loading the base's weights.

    Raises:
        ValueError: The base lacks a module that the adapter changes.
    """
    import torch

    with quiet(), hub_errors(model_path), torch.device("meta"):
        config = read_config(find_model(model_path))
        empty = auto_class(config).from_config(config)
    if missing := sorted(set(modules) - dict(empty.named_modules()).keys()):
        raise ValueError(
            f"the adapter changes {missing[0]}, which the base {model_path} lacks: set "
            "model.model_path to the base that the adapter was trained on"
        )
    return 2 * empty.num_parameters()


def _refuse_without_room(size: int, folder: Path) -> None:
    """Print how much room a merge of `size` bytes needs; refuse it if memory or disk lacks room."""
    import psutil
    import torch

    free_memory()
    folder.parent.mkdir(parents=True, exist_ok=True)
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(folder.parent).free
    memory = torch.cuda.mem_get_info()[0] if cuda_available() else memory
    message = f"the merge takes {size / 1e9:.2g} GB in memory and on the disk: 16-bit weights"
    print(message)
    if min(memory, disk) < 1.05 * size:
        raise RuntimeError(
            f"{message}; free: {memory / 1e9:.3g} GB of memory and {disk / 1e9:.3g} GB on the disk "
            f"of {folder.parent}. Stop other programs, point GRPO_NB_RUNS at a larger disk, or set "
            "CUDA_VISIBLE_DEVICES=-1 to merge in main memory instead of the GPU's"
        )
