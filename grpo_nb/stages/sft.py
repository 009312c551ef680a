"""Fine-tune the policy for a few steps, so that it learns to write the completions of given rows.

TRL's SFTTrainer does this.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from datasets import (
    Dataset,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from transformers.trainer_callback import PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from grpo_nb import ranks
from grpo_nb.data.sources import Row
from grpo_nb.models import Policy, adapter_in_fp32, cuda_available
from grpo_nb.models.hub import quiet
from grpo_nb.models.template import render
from grpo_nb.rewards.prompts import images_of
from grpo_nb.stages.trainer import with_image_column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs import Stage


class Progress(TrainerCallback):
    """Show each step of the warm-up as the progress of a stage."""

    def __init__(self, stage: "Stage") -> None:
        self.stage = stage

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        if "loss" in logs:
            note = f"SFT warm-up, loss {logs['loss']:.2f}"
            self.stage.progress(state.global_step, state.max_steps, note)


def train_on(policy: Policy, stage: "Stage", rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Train the policy to write the completions of these rows; return each step's metrics.

    Args:
        policy: The policy.
        stage: The stage, with `train.sft_steps`.
        rows: Rows with prompt and completion, as `data.worked_rows` returns them.
    """
    # The prompts are rendered as for GRPO. TRL would render the whole chat and look for the prompt
    # in it, but the prompt may differ there if the template opens a thinking block.
    rows = list(rows)
    prompts = [row["prompt"] for row in rows]
    as_example = _texts if any(map(images_of, prompts)) else _ids
    dataset = Dataset.from_list([as_example(policy.tokenizer, row) for row in rows])
    if has_bars := not are_progress_bars_disabled():
        disable_progress_bars()  # one for each step of preparing rows
    with quiet(), adapter_in_fp32(policy.model):
        trainer = SFTTrainer(
            policy.model,
            _sft_config(stage),
            train_dataset=with_image_column(dataset, prompts),
            processing_class=policy.processing_class,
            callbacks=[Progress(stage)],
        )
    if has_bars:
        enable_progress_bars()
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [{"step": line["step"], "loss": line["loss"]} for line in lines]


def _texts(tokenizer: "PreTrainedTokenizerBase", row: dict) -> dict[str, str]:
    """Return a rendered prompt, and its completion up to the stop token.

    For each micro-batch TRL inserts the tokens of the images into the prompt.
    """
    completion = row["completion"][0]["content"] + tokenizer.eos_token
    return {"prompt": render(tokenizer, row["prompt"]), "completion": completion}


def _ids(tokenizer: "PreTrainedTokenizerBase", row: dict) -> dict[str, list[int]]:
    """Encode a prompt and its completion up to the stop token; only the completion is learnt."""
    texts = list(_texts(tokenizer, row).values())
    prompt, completion = tokenizer(texts, add_special_tokens=False)["input_ids"]
    mask = [0] * len(prompt) + [1] * len(completion)
    return {"input_ids": prompt + completion, "completion_mask": mask}


def _sft_config(stage: "Stage") -> SFTConfig:
    train, gpu = stage.config.train, cuda_available()
    rows = min(16, stage.config.grpo.per_device_train_batch_size) // ranks.count()
    return SFTConfig(
        output_dir=str(stage.run / "warm_up.log"),
        max_steps=train.sft_steps,
        learning_rate=train.sft_learning_rate,
        per_device_train_batch_size=max(1, rows),
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
