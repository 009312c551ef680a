"""Fine-tune the policy for a few steps, so that it learns to write the completions of given rows.

TRL's SFTTrainer does this. `Watch` measures the policy every few steps, and may end training.
"""

from collections.abc import Callable, Iterable, Sequence
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
from grpo_nb.stages.pass_rate import PASS, suffices
from grpo_nb.stages.trainer import with_image_column

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs import Stage

LOOK_STEPS = 4  # steps between two measurements of the policy
PATIENCE = 8  # measurements without progress, after which training ends
ALIKE = 0.2  # share of distinct completions in a group, below which rows are being memorized
Line = dict[str, Any]  # {"step": 4, "loss": 1.2, "entropy": 0.8, "pass@8": 0.1, …}


class Watch(TrainerCallback):
    """Keep the metrics of each step, show the progress, and measure the policy.

    Args:
        stage: The stage, with `train.sft_until`.
        look: A function that calls `pass_rate.measure`; if None, nothing is measured.
    """

    def __init__(self, stage: "Stage", look: Callable[[], Line] | None) -> None:
        self.stage, self.look = stage, look
        self.lines: list[Line] = []
        self.end = ""  # why training ended early

    def on_log(self, args: Any, state: Any, control: Any, logs: Line, **_: Any) -> None:
        if "loss" not in logs:
            return
        line = {"step": state.global_step, "loss": logs["loss"]}
        self.lines.append(line)
        note = f"SFT warm-up, loss {line['loss']:.2f}"
        if self.look and state.global_step % LOOK_STEPS == 0:
            line |= self.look()
            note += f", {PASS} {line[PASS]:.2f}"
            self.end = reason_to_end(self.lines, self.stage.config.train.sft_until)
            control.should_training_stop = bool(self.end)
        self.stage.progress(state.global_step, state.max_steps, note)


def reason_to_end(lines: Sequence[Line], until: float) -> str:
    """Return why the warm-up ends after the latest measurement; "" if it continues.

    Args:
        lines: The metrics of each step so far; the last line includes a measurement.
        until: The pass@8 that suffices (`train.sft_until`).
    """
    looks, now = [line for line in lines if PASS in line], lines[-1]
    if suffices(now, until):
        return f"ended, as {PASS} reached train.sft_until = {until:g}"
    if now["distinct"] < ALIKE:
        return f"ended, as the completions of a group became alike ({now['distinct']:.0%} distinct)"
    if len(looks) <= PATIENCE:
        return ""
    before, last = looks[:-PATIENCE], looks[-PATIENCE:]
    rises = max(look[PASS] for look in last) > max(look[PASS] for look in before)
    falls = min(look["loss"] for look in last) < 0.9 * min(look["loss"] for look in before)
    if rises or falls:
        return ""
    return f"ended, as neither {PASS} nor the loss got better for {PATIENCE * LOOK_STEPS} steps"


def train_on(
    policy: Policy, stage: "Stage", rows: Iterable[Row], look: Callable[[], Line] | None = None
) -> tuple[list[Line], str]:
    """Train the policy to write the completions of these rows.

    Args:
        policy: The policy.
        stage: The stage, with `train.sft_steps`.
        rows: Rows with prompt and completion, as `data.worked_rows` returns them.
        look: The function that measures the policy, as in `Watch`.

    Returns:
        The metrics, one line per step, and why training ended early; "" if it did not.
    """
    watch = Watch(stage, look)
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
            callbacks=[watch],
        )
    if has_bars:
        enable_progress_bars()
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return watch.lines, watch.end


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
