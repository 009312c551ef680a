"""A short supervised warm-up on reference answers, before GRPO: it shows the format once."""

from pathlib import Path
from typing import TYPE_CHECKING

from grpo_nb import models
from grpo_nb.models import Policy, cuda_available
from grpo_nb.models.chat import quiet, render
from grpo_nb.runs import Stage, atomic_path, sha256, write_json
from grpo_nb.runs.files import read_json
from grpo_nb.training import checkpoints, ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def warm_up(policy: Policy, stage: Stage) -> str:
    """SFT warm-up: `train.sft_steps` steps on data/sft.parquet; 0 steps do nothing.

    It is done once in a run, into warm_up/: a training that goes on loads what it gave.

    Returns:
        What was done, for the reader.

    Raises:
        ValueError: Steps are asked for, and notebook 1 wrote no rows for them.
    """
    train, folder = stage.config.train, stage.run / "warm_up"
    if not train.sft_steps:
        return "no SFT warm-up (train.sft_steps = 0)"
    rows = stage.run / "data/sft.parquet"
    if not rows.is_file():
        raise ValueError(
            f"train.sft_steps = {train.sft_steps} needs rows to learn from: set "
            "data.sft_rows and prepare the data again"
        )
    known = {name: value for name, value in train if name.startswith("sft_")}
    known |= {"seed": stage.config.seed, "rows": sha256(rows)}
    known |= {"model": stage.config.model.model_dump(), "policy": stage.config.policy.model_dump()}
    whole = ranks.from_main(lambda: checkpoints.whole_or_aside(folder))
    done = read_json(folder / "about.json") if whole else {}
    if done.get("of") == known:
        models.load_weights(policy, folder)
    else:
        losses = _train(policy, stage, rows)
        done = {"of": known, "loss_first": losses[0], "loss_last": losses[-1]}

        def save() -> None:
            with atomic_path(folder) as temporary:
                checkpoints.save_trained(policy.model, temporary)
                write_json(temporary / "about.json", done)
                checkpoints.seal(temporary)

        ranks.from_main(save)
    first, last = done["loss_first"], done["loss_last"]
    return f"{train.sft_steps} SFT warm-up steps: loss {first:.3f} → {last:.3f}"


def _ids(tokenizer: "PreTrainedTokenizerBase", row: dict) -> dict[str, list[int]]:
    """The prompt with its completion up to the end of the turn, which alone is learnt."""
    answer = row["completion"][0]["content"] + tokenizer.eos_token
    texts = [render(tokenizer, row["prompt"]), answer]
    before, written = tokenizer(texts, add_special_tokens=False)["input_ids"]
    mask = [0] * len(before) + [1] * len(written)
    return {"input_ids": before + written, "completion_mask": mask}


def _train(policy: Policy, stage: Stage, rows: Path) -> list[float]:
    """The losses, one a step."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from grpo_nb.training.trainer import kept_in_32_bit

    train, gpu = stage.config.train, cuda_available()
    args = SFTConfig(
        output_dir=str(stage.run / "warm_up.log"),
        max_steps=train.sft_steps,
        learning_rate=train.sft_learning_rate,
        per_device_train_batch_size=max(
            1, min(16, train.per_device_train_batch_size) // ranks.count()
        ),
        seed=stage.config.seed,
        max_length=stage.config.model.max_seq_length,
        completion_only_loss=True,
        router_aux_loss_coef=0.0,
        gradient_checkpointing=gpu,
        use_cpu=not gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # As GRPO will see them: TRL would look for the prompt in a chat rendered whole, where a
    # template that opens a block of thought writes another one.
    known = Dataset.from_parquet(str(rows))
    dataset = Dataset.from_list([_ids(policy.tokenizer, row) for row in known])
    with quiet(), kept_in_32_bit(policy.model):  # a bar for each of its preparations of the rows
        trainer = SFTTrainer(
            policy.model, args, train_dataset=dataset, processing_class=policy.tokenizer
        )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
