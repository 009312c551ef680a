"""Fine-tune on reference answers for a few steps before GRPO, so that the model knows the form."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_nb import models
from grpo_nb.data.store import read_rows
from grpo_nb.models import Policy, cuda_available
from grpo_nb.models.hub import quiet
from grpo_nb.models.template import render
from grpo_nb.reward_lab.baseline import WARMED
from grpo_nb.runs import Stage, atomic_path, sha256, write_json
from grpo_nb.runs.files import read_json
from grpo_nb.training import checkpoints, ranks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from trl import SFTConfig


def warm_up_base(stage: Stage) -> str:
    """Do the SFT warm-up before the baseline, which judges what GRPO will start from.

    Returns:
        A sentence for the reader.
    """
    config = stage.config
    losses = _saved_losses(stage)
    if config.train.sft_steps and not losses:
        model = config.model.model_copy(update={"fast_inference": "off"})
        policy = models.load_policy(model, config.seed, config.policy)
        try:
            return warm_up(policy, stage)
        finally:
            policy.close()
    return _sentence(losses)


def warm_up(policy: Policy, stage: Stage) -> str:
    """Do the SFT warm-up: `train.sft_steps` steps on data/sft.parquet; 0 steps do nothing.

    A run does it once, saves it in rewards/warm_up/, and loads it from there afterwards.

    Returns:
        A sentence for the reader.

    Raises:
        ValueError: There are steps to do, and notebook 1 wrote no rows for them.
    """
    folder = stage.run / WARMED
    losses = ranks.from_main(lambda: _saved_losses(stage))
    if losses:
        models.load_weights(policy, folder)
    elif stage.config.train.sft_steps:
        losses = train_on(policy, stage, read_rows(_rows(stage)))

        def save() -> None:
            with atomic_path(folder) as temporary:
                checkpoints.save_trained(policy.model, temporary)
                policy.tokenizer.save_pretrained(temporary)
                write_json(temporary / "about.json", {"of": _identity(stage), "losses": losses})
                checkpoints.seal(temporary)

        ranks.from_main(save)
    return _sentence(losses)


def _saved_losses(stage: Stage) -> list[float]:
    """Return the losses of the saved warm-up, one per step; none without one for these settings."""
    folder = stage.run / WARMED
    if not (stage.config.train.sft_steps and checkpoints.whole_or_aside(folder)):
        return []
    about = read_json(folder / "about.json")
    return about["losses"] if about["of"] == _identity(stage) else []


def _identity(stage: Stage) -> dict[str, Any]:
    """Return everything on which the weights after the warm-up depend."""
    config = stage.config
    settings = {name: value for name, value in config.train if name.startswith("sft_")}
    settings |= {"seed": config.seed, "rows": sha256(_rows(stage))}
    model = config.model.model_dump(exclude={"fast_inference"})
    return settings | {"model": model, "finetuning": config.policy.finetuning}


def _rows(stage: Stage) -> Path:
    rows = stage.run / "data/sft.parquet"
    if not rows.is_file():
        raise ValueError(
            f"train.sft_steps = {stage.config.train.sft_steps} needs rows to learn from: set "
            "data.sft_rows and prepare the data again"
        )
    return rows


def _sentence(losses: list[float]) -> str:
    if not losses:
        return "no SFT warm-up (train.sft_steps = 0)"
    return f"{len(losses)} SFT warm-up steps: loss {losses[0]:.3f} → {losses[-1]:.3f}"


def _ids(tokenizer: "PreTrainedTokenizerBase", row: dict) -> dict[str, list[int]]:
    """Encode a prompt and its completion up to the stop token; only the completion is learnt."""
    answer = row["completion"][0]["content"] + tokenizer.eos_token
    texts = [render(tokenizer, row["prompt"]), answer]
    prompt, completion = tokenizer(texts, add_special_tokens=False)["input_ids"]
    mask = [0] * len(prompt) + [1] * len(completion)
    return {"input_ids": prompt + completion, "completion_mask": mask}


def train_on(policy: Policy, stage: Stage, rows: Iterable[dict[str, Any]]) -> list[float]:
    """Train the policy to write reference answers.

    Args:
        policy: The policy.
        stage: The stage, with `train.sft_steps`.
        rows: Prompts with their completions, as in data/sft.parquet.

    Returns:
        The losses, one per step.
    """
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback, TrainerCallback
    from trl import SFTTrainer

    from grpo_nb.training.trainer import kept_in_32_bit

    class Progress(TrainerCallback):
        def on_log(self, args, state, control, logs, **kwargs) -> None:
            if "loss" in logs:
                note = f"SFT warm-up, loss {logs['loss']:.2f}"
                stage.progress(state.global_step, state.max_steps, note)

    # The prompts are rendered as for GRPO. TRL would render the whole chat and look for the prompt
    # in it, which differs if the template opens a block of thought.
    dataset = Dataset.from_list([_ids(policy.tokenizer, row) for row in rows])
    with quiet(), kept_in_32_bit(policy.model):  # TRL shows a bar for each step of preparing rows
        trainer = SFTTrainer(
            policy.model,
            _sft_config(stage),
            train_dataset=dataset,
            processing_class=policy.tokenizer,
            callbacks=[Progress()],
        )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def _sft_config(stage: Stage) -> "SFTConfig":
    from trl import SFTConfig

    train, gpu = stage.config.train, cuda_available()
    rows = min(16, train.per_device_train_batch_size) // ranks.count()
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
