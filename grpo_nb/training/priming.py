"""A short supervised warm-up on primed rows, before GRPO: it shows the format once."""

from pathlib import Path
from typing import Any

from grpo_nb import models
from grpo_nb.models import Policy, cuda_available
from grpo_nb.models.chat import quiet
from grpo_nb.runs import Stage, atomic_path, write_json
from grpo_nb.training import ranks
from grpo_nb.training.trainer import save_trained, train_in_32_bit


def prime(policy: Policy, stage: Stage) -> Path | None:
    """Train `train.priming_steps` on data/priming.parquet; its adapter's folder, or None.

    It is done once in a training: a resumed one loads what it gave.

    Raises:
        ValueError: Steps are asked for, and notebook 1 wrote no rows for them.
    """
    steps, folder = stage.config.train.priming_steps, stage.run / "train/0-priming"
    if not steps:
        return None
    rows = stage.run / "data/priming.parquet"
    if not rows.is_file():
        raise ValueError(
            f"train.priming_steps = {steps} needs rows to learn from: set data.priming_rows in "
            "notebook 1 and run it again"
        )
    if (folder / "stage.json").is_file():
        models.load_weights(policy, folder)
        return folder
    losses = _train(policy, stage, rows, folder)
    about = {"steps": steps, "loss_first": losses[0], "loss_last": losses[-1]}
    ranks.from_main(lambda: _save(policy, folder, about))
    print(f"primed in {steps} supervised steps: loss {losses[0]:.3f} → {losses[-1]:.3f}")
    return folder


def _save(policy: Policy, folder: Path, about: dict[str, float]) -> None:
    with atomic_path(folder) as temporary:
        save_trained(policy.model, temporary)
        write_json(temporary / "stage.json", about)


def _train(policy: Policy, stage: Stage, rows: Path, folder: Path) -> list[float]:
    """The losses, one a step."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    train = stage.config.train
    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": train.priming_steps,
        "learning_rate": train.priming_learning_rate,
        "per_device_train_batch_size": max(
            1, min(16, train.per_device_train_batch_size) // ranks.count()
        ),
        "seed": stage.config.seed,
        "max_length": stage.config.model.max_seq_length,
        "gradient_checkpointing": cuda_available(),
        "use_cpu": not cuda_available(),
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    with quiet():  # a bar for each of its passes over the rows
        trainer = SFTTrainer(
            model=policy.model,
            processing_class=policy.tokenizer,
            args=SFTConfig(**arguments),
            train_dataset=Dataset.from_parquet(str(rows)),
        )
    trainer.remove_callback(PrinterCallback)
    train_in_32_bit(policy.model)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
