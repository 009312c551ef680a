"""Merge the adapter, so that the merged model is the policy trained; judged before it counts."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from grpo_nb import data, rewards
from grpo_nb.bench import Bench
from grpo_nb.chat import load_tokenizer
from grpo_nb.config import RunConfig
from grpo_nb.export import parity
from grpo_nb.export.weights import (
    Base,
    Delta,
    merged_tensors,
    quantization_config,
    read_adapter,
    trained_base,
    write_shards,
)
from grpo_nb.models import load_checkpoint
from grpo_nb.runs import Run, atomic_path, write_json

MERGED = "model/merged"


def merge(
    run: Run, config: RunConfig, mode: str = "", *, force: bool = False, target: str = MERGED
) -> tuple[Path, dict[str, Any]]:
    """Write the merged model, and its parity report beside it.

    It is written to a temporary place, judged there, and put in place only if it passes.
    One tensor of the base is handled at a time, so that memory may be smaller than the model.

    Args:
        mode: Of settings.MergeMode; default: export.merge. merged_16bit: the base as it was
            trained on (a 4-bit base dequantised) + adapter, the policy that was rewarded.
            merged_16bit_original_base: the original 16-bit base + adapter; merged_4bit: the
            first, quantised again. These two are other policies.
        force: Put it in place although it fails the gate.
        target: Folder below the run.

    Returns:
        (the folder: safetensors, tokenizer, chat template, generation config; the report).

    Raises:
        ValueError: The adapter does not fit the base, is all zero, or the merge fails the gate.
        RuntimeError: Not enough room on the disk.
    """
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # its hint at a faster kernel
    if config.policy.finetuning == "full":
        return _copy_whole(run, config, target)
    mode, adapter = mode or config.export.merge, run / "train/adapter"
    deltas = read_adapter(adapter)
    base_name = trained_base(config.model.model_path, adapter)
    base, folder = Base(base_name), run / target
    _clear_leftovers(folder)
    _check_disk(base, folder)
    with atomic_path(folder) as temporary:
        write_model(base, deltas, mode, config, temporary)
        report = {
            "mode": mode,
            "base": base_name,
            "base in training": config.model.quantization,
            **_judge(run, config, base, deltas, mode, temporary),
        }
        report["forced"] = force and not report["passed"]
        beside = folder.with_name("parity.json" if target == MERGED else f"{folder.name}.json")
        write_json(beside, report)
        if not (report["passed"] or force):
            raise ValueError(
                f"the {mode} model fails the parity gate ({'; '.join(report['faults'])}) and is "
                f"not put in place; see {beside}. force = True exports it all the same"
            )
    return folder, report


def trained_paths(run: Run, config: RunConfig) -> tuple[str, str, Path | None]:
    """(base, policy, adapter) to load: where every weight was trained, there is no adapter."""
    adapter = run / "train/adapter"
    if config.policy.finetuning == "full":
        return config.model.model_path, str(adapter), None
    base = trained_base(config.model.model_path, adapter)
    return base, base, adapter


def _copy_whole(run: Run, config: RunConfig, target: str) -> tuple[Path, dict[str, Any]]:
    """The model of a full fine-tuning, whose weights were trained in 32 bit, in 16 bit."""
    model = load_checkpoint(str(run / "train/adapter"), adapter=None, quantization="16bit")
    with atomic_path(run / target) as temporary:
        model.save_pretrained(temporary, max_shard_size=int(config.export.max_shard_gb * 1e9))
        load_tokenizer(config.model.model_path).save_pretrained(temporary)
    report = {"mode": "full fine-tuning", "base": config.model.model_path, "passed": True}
    write_json(run / "model/parity.json", report)
    return run / target, report


def write_model(
    base: Base, deltas: dict[str, Delta], mode: str, config: RunConfig, folder: Path
) -> None:
    """Weights, config, tokenizer, chat template and generation config into a new folder."""
    from transformers import GenerationConfig

    if not [*base.folder.glob("tokenizer*"), *base.folder.glob("vocab*")]:
        raise FileNotFoundError(
            f"{base.folder} holds no tokenizer (tokenizer.json or its like): put back the one it "
            "came with; stage 03 has kept a copy beside the adapter, in train/adapter/"
        )
    folder.mkdir(parents=True)
    load_tokenizer(config.model.model_path).save_pretrained(folder)
    tensors = merged_tensors(base, deltas, mode, config.model.quantization)
    write_shards(tensors, folder, config.export.max_shard_gb * 1e9)
    settings = base.model.config
    settings.architectures = [type(base.model).__name__]
    if mode == "merged_4bit":
        settings.quantization_config = quantization_config("4bit")
    settings.save_pretrained(folder)
    if (base.folder / "generation_config.json").exists():
        GenerationConfig.from_pretrained(base.folder).save_pretrained(folder)


def copy_adapter(run: Run, config: RunConfig) -> Path:
    """Write model/adapter/: the adapter alone, checked, with its tokenizer."""
    source, target = run / "train/adapter", run / "model/adapter"
    read_adapter(source)
    trained_base(config.model.model_path, source)
    with atomic_path(target) as temporary:
        shutil.copytree(source, temporary)
    return target


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
    run: Run, config: RunConfig, base: Base, deltas: dict[str, Delta], mode: str, folder: Path
) -> dict[str, Any]:
    """The parity report's verdict and figures."""
    model = config.model
    expected = merged_tensors(base, deltas, mode, model.quantization)
    compared, differ = parity.differing_layers(expected, folder)
    tuned = load_checkpoint(
        trained_base(model.model_path, run / "train/adapter"),
        adapter=run / "train/adapter",
        quantization=model.quantization,
    )
    merged = load_checkpoint(str(folder.resolve()), adapter=None, quantization="16bit")
    preset = rewards.load_preset(config.rewards.preset, config.rewards.reward_weights)
    bench = Bench(preset, config.train, load_tokenizer(str(folder.resolve())))
    rows = data.load(run, "eval")[: config.export.parity_prompts]
    seen = parity.behaviour(tuned, merged, bench, rows, config.train.max_completion_length)
    faults = parity.verdict(mode, seen, differ)
    norm = sum(float(delta.up.float().square().sum()) for delta in deltas.values()) ** 0.5
    untrained = [name for name, delta in deltas.items() if not delta.up.any()]
    return {
        "passed": not faults,
        "faults": faults,
        "marks": dict(zip(("kl", "token_agreement"), parity.MARKS[mode], strict=True)),
        **seen,
        "layers": {"compared": compared, "differ": differ},
        # LoRA begins with B = 0: a B that is not has left its initial state.
        "adapter": {"layers": len(deltas), "norm of B": norm, "still as begun": untrained},
    }


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed merge left; the run's lock says that no other is at work."""
    for left in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(left)


def _check_disk(base: Base, folder: Path) -> None:
    needed = 2 * base.model.num_parameters()
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free
    if free < needed * 1.05:
        raise RuntimeError(
            f"the merged model takes {needed / 1e9:.2f} GB and {folder.parent} has "
            f"{free / 1e9:.2f} GB free: free some space, or point GRPO_NB_RUNS at a larger disk"
        )
