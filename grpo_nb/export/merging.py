"""Merge the adapter, so that the merged model is the policy trained; judged before it counts."""

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import data, rewards
from grpo_nb.export import parity
from grpo_nb.export.adapter import Delta, read_adapter, trained_base
from grpo_nb.models import cuda_available, free_memory, load_checkpoint
from grpo_nb.models.chat import find_model, hub_errors, load_tokenizer, quiet
from grpo_nb.models.checkpoint import load_base
from grpo_nb.reward_lab import Bench
from grpo_nb.runs import Run, atomic_path, write_json
from grpo_nb.runs.config import RunConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MERGED = "model/merged"


def merge(
    run: Run, config: RunConfig, mode: str = "", *, force: bool = False, target: str = MERGED
) -> tuple[Path, dict[str, Any]]:
    """Write the merged model, and its parity report beside it.

    It is written to a temporary place, judged there, and put in place only if it passes. The
    16-bit weights are held in memory, on the GPU where there is one; how much that is, is printed.

    Args:
        mode: Of settings.MergeMode; default: export.merge. merged_16bit: the base as it was
            trained on (a 4-bit base dequantised) + adapter, the policy that was rewarded.
            merged_16bit_original_base: the original 16-bit base + adapter, another policy.
        force: Put it in place although it fails the gate.
        target: Folder below the run.

    Returns:
        (the folder: safetensors, tokenizer, chat template, generation config; the report).

    Raises:
        ValueError: The adapter does not fit the base, is all zero, or the merge fails the gate.
        RuntimeError: Not enough memory, or room on the disk.
    """
    folder, adapter = run / target, run / "train/adapter"
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left)  # of a killed merge: the run's lock says that no other is at work
    if config.policy.finetuning == "full":
        with atomic_path(folder) as temporary:
            model = load_checkpoint(str(adapter), adapter=None, quantization="16bit")
            _write(model, config, temporary)
        report = {"mode": "full fine-tuning", "base": config.model.model_path, "passed": True}
        write_json(run / "model/parity.json", report)
        return folder, report
    mode = mode or config.export.merge
    deltas, base = read_adapter(adapter), trained_base(config.model.model_path, adapter)
    _check_room(_check_fit(base, deltas), folder)
    with atomic_path(folder) as temporary:
        _write(_merged(base, adapter, mode, config), config, temporary)
        free_memory()
        report = {
            "mode": mode,
            "base": base,
            "base in training": config.model.quantization,
            **_judge(run, config, base, deltas, mode, temporary),
        }
        free_memory()  # of both models, which an engine after this needs
        report["forced"] = force and not report["passed"]
        beside = folder.with_name("parity.json" if target == MERGED else f"{folder.name}.json")
        write_json(beside, report)
        if not (report["passed"] or force):
            raise ValueError(
                f"the {mode} model fails the parity gate ({'; '.join(report['faults'])}) and is "
                f"not put in place; see {beside}. force = True exports it all the same"
            )
    return folder, report


def base_in_16bit(base: str, mode: str, quantization: str) -> "PreTrainedModel":
    """The base that the adapter is added to: as it was kept in training, or as it was before."""
    import torch

    original = mode == "merged_16bit_original_base"
    with quiet(), hub_errors(base):
        settings = {"dtype": torch.bfloat16, "use_safetensors": True}
        model = load_base(base, "16bit" if original else quantization, **settings)
        packed = hasattr(model.config, "quantization_config")
        if packed and original:
            raise ValueError(
                f"{base} holds 4-bit weights, no original in 16 bit: set export.merge to "
                "merged_16bit, or model.model_path to the original"
            )
        return _dequantized(model) if packed else model


def _dequantized(model: "PreTrainedModel") -> "PreTrainedModel":
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    # On saving, transformers takes back what it did on reading, and fails at unpacking 4 bit.
    model._weight_conversions = [
        done
        for done in model._weight_conversions
        if not any(isinstance(one, Bnb4bitDeserialize) for one in getattr(done, "operations", []))
    ]
    return model.dequantize()


def _merged(base: str, adapter: Path, mode: str, config: RunConfig) -> "PreTrainedModel":
    model = base_in_16bit(base, mode, config.model.quantization)
    from peft import PeftModel  # after it: bitsandbytes, which it imports, is quiet then

    return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def _write(model: "PreTrainedModel", config: RunConfig, folder: Path) -> None:
    """Weights, config, generation config, tokenizer and chat template into a new folder."""
    with quiet():
        model.save_pretrained(folder, max_shard_size=int(config.export.max_shard_gb * 1e9))
    load_tokenizer(config.model.model_path).save_pretrained(folder)


def check_complete(folder: Path) -> Path:
    """The folder, if it holds a whole model.

    Raises:
        FileNotFoundError: A part is missing, as after a write that was killed.
    """
    index = folder / "model.safetensors.index.json"
    needed = {"config.json", "tokenizer_config.json"}
    if index.exists():
        needed |= set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        needed.add("model.safetensors")
    missing = sorted(name for name in needed if not (folder / name).exists())
    if missing:
        raise FileNotFoundError(
            f"{folder} lacks {', '.join(missing)}: it is no whole model. Run "
            "04_merge_and_infer (--from 04) again"
        )
    return folder


def _judge(
    run: Run, config: RunConfig, base: str, deltas: dict[str, Delta], mode: str, folder: Path
) -> dict[str, Any]:
    """The parity report's verdict and figures."""
    kept = config.model.quantization
    compared, differ = parity.differing_layers(base_in_16bit(base, mode, kept), deltas, folder)
    free_memory()
    tuned = load_checkpoint(base, adapter=run / "train/adapter", quantization=kept)
    merged = load_checkpoint(str(folder.resolve()), adapter=None, quantization="16bit")
    preset = rewards.load_preset(config.rewards.preset, config.rewards.reward_weights)
    bench = Bench(preset, config.train, load_tokenizer(str(folder.resolve())))
    rows = data.load(run, "eval")[: config.export.parity_prompts]
    sizes = (config.train.max_completion_length, config.evaluate.eval_batch_size)
    seen = parity.behaviour(tuned, merged, bench, rows, *sizes, deltas)
    faults = parity.verdict(mode, seen, differ)
    norm = sum(float(delta.up.float().square().sum()) for delta in deltas.values()) ** 0.5
    untrained = [name for name, delta in deltas.items() if not delta.up.any()]
    return {
        "passed": not faults,
        "faults": faults,
        "marks": parity.marks(mode, seen),
        **seen,
        "layers": {"compared": compared, "differ": differ},
        # LoRA begins with B = 0: a B that is not has left its initial state.
        "adapter": {"layers": len(deltas), "norm of B": norm, "still as begun": untrained},
    }


def _check_fit(base: str, deltas: dict[str, Delta]) -> int:
    """Bytes of the merged weights, or what the base lacks: it is read without its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = Path(find_model(base))
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        raise FileNotFoundError(
            f"{folder} holds no *.safetensors: load the base with transformers and save it again "
            "with model.save_pretrained(folder)"
        )
    if folder.is_dir() and not [*folder.glob("tokenizer*"), *folder.glob("vocab*")]:
        raise FileNotFoundError(
            f"{folder} holds no tokenizer (tokenizer.json or its like): put back the one it came "
            "with; train/adapter/ of the run has a copy"
        )
    with quiet(), hub_errors(base), torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(find_model(base)))
    shapes = {name: list(weight.shape) for name, weight in empty.named_parameters()}
    for name, delta in deltas.items():
        has, changed = shapes.get(name), [len(delta.up), delta.down.shape[1]]
        if has != changed:
            raise ValueError(
                f"{name} is {has or 'missing'} in the base {base} and {changed} in the adapter: "
                "it was made for another base"
            )
    return 2 * sum(math.prod(shape) for shape in shapes.values())


def _check_room(needed: int, folder: Path) -> None:
    """Say what memory the merge takes; refuse where that, or the disk, is too small."""
    import psutil
    import torch

    free_memory()
    place, free = "this machine", psutil.virtual_memory().available
    if cuda_available():
        place, free = "the GPU", torch.cuda.mem_get_info()[0]
    said = (
        f"{needed / 1e9:.2g} GB of 16-bit weights in memory; {place} has {free / 1e9:.3g} GB free"
    )
    if free < needed:
        raise RuntimeError(
            f"the merge holds {said}: stop what else runs there, or take a larger one"
            + "; CUDA_VISIBLE_DEVICES=-1 merges in main memory" * cuda_available()
        )
    print(f"the merge holds {said}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < needed * 1.05:
        raise RuntimeError(
            f"the merged model takes {needed / 1e9:.2f} GB and {folder.parent} has "
            f"{free / 1e9:.2f} GB free: free some space, or point GRPO_NB_RUNS at a larger disk"
        )
