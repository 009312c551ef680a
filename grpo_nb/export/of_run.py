"""Merge the adapter of a run in its stage 04."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_nb import data
from grpo_nb.checks import Check
from grpo_nb.export.merging import refuse, try_merge
from grpo_nb.files import write_json
from grpo_nb.models import trained_base

if TYPE_CHECKING:
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import RunConfig

MERGED = "model/merged"


def merge_run(stage: "Stage", *, force: bool = False) -> tuple[Path, Check]:
    """Write model/merged and model/parity.json, and record the check "merge".

    Args:
        stage: Stage 04 of a trained run.
        force: Whether to put the model in place even if it fails the gate.

    Returns:
        The folder, and the check; the errors are those of `merge`.
    """
    run, config = stage.run, stage.config
    folder = run / MERGED
    for leftover in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(leftover)  # left by a killed merge; the run's lock excludes a running one
    paths = trained_paths(run, config)
    check, figures = try_merge(
        paths,
        folder,
        [row["prompt"] for row in data.load(run, "eval")[: config.export.parity_prompts]],
        quantization=config.model.quantization,
        sampling={
            "max_completion_length": config.grpo.max_completion_length,
            "batch_size": config.evaluate.eval_batch_size,
        },
        chat_template_kwargs=config.grpo.chat_template_kwargs,
        force=force,
    )
    about = {"base": paths[0], "base in training": config.model.quantization}
    write_json(run / "model/parity.json", {"passed": check.state == "ok"} | about | figures)
    stage.record_checks([check])
    return folder, refuse(check, force)


def trained_paths(run: "Run", config: "RunConfig") -> tuple[str, str, Path | None]:
    """Return (base, policy, adapter) to load; after full fine-tuning the adapter is None.

    Raises:
        FileNotFoundError: The run has not been trained.
    """
    adapter = run / "train/adapter"
    if not adapter.is_dir():
        raise FileNotFoundError(f"run {run.name!r} holds no train/adapter: run 03_train_grpo first")
    if config.model.full_finetuning:
        return config.model.model_name, str(adapter), None
    base = trained_base(config.model.model_name, adapter)
    return base, base, adapter
