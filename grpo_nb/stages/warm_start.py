"""Fine-tune on right answers before GRPO, so that the model solves some prompts at all.

The answers are those of data/sft.parquet, with worked steps if the source has them. TRL's
SFTTrainer does the training.
"""

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from grpo_nb import data, models, ranks
from grpo_nb.data.images import encode
from grpo_nb.data.preparation import as_dataset
from grpo_nb.data.sources import Row
from grpo_nb.files import atomic_path, read_json, sha256, write_json
from grpo_nb.models import Policy, adapter_in_fp32, cuda_available
from grpo_nb.models.template import render
from grpo_nb.reward_lab.baseline import WARMED
from grpo_nb.rewards import load_rewards
from grpo_nb.rewards.prompts import images_of
from grpo_nb.runs.config import flatten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from grpo_nb.runs import Stage

SETTINGS = ("seed", "model.", "lora.", "policy.adapter", "grpo.chat_template", "train.sft_")


def warm_up_base(stage: "Stage") -> str:
    """Do the SFT warm-up before the baseline is sampled.

    The baseline thus measures the policy that GRPO starts from.

    Returns:
        A sentence that describes the warm-up.
    """
    config, about = stage.config, _saved(stage)
    if about or not config.train.sft_steps:
        return _sentence(about)
    model = config.model.model_copy(update={"fast_inference": "off"})  # vLLM is not needed here
    with closing(models.load_policy(config.model_copy(update={"model": model}))) as policy:
        return warm_up(policy, stage)


def warm_up(policy: Policy, stage: "Stage") -> str:
    """Do the SFT warm-up with a loaded policy; do nothing if `train.sft_steps` is 0.

    The warm-up runs once. Its weights are saved in rewards/warm_up/, and loaded from there later.

    Returns:
        A sentence that describes the warm-up.
    """
    about = ranks.from_main(lambda: _saved(stage))
    if about:
        models.load_weights(policy, stage.run / WARMED)
    elif stage.config.train.sft_steps:
        rows = data.worked_rows(data.load(stage.run, "sft"), load_rewards(stage.config.rewards))
        about = {"of": _identity(stage), "lines": train_on(policy, stage, rows)}
        ranks.from_main(lambda: _save(policy, stage, about))
    return _sentence(about)


def _save(policy: Policy, stage: "Stage", about: dict[str, Any]) -> None:
    from grpo_nb.stages.checkpoints import save_trained

    with atomic_path(stage.run / WARMED) as temporary:
        save_trained(policy.model, temporary)
        policy.tokenizer.save_pretrained(temporary)
        write_json(temporary / "about.json", about)


def _saved(stage: "Stage") -> dict[str, Any]:
    """Return about.json of the saved warm-up; {} if there is none for these settings."""
    path = stage.run / WARMED / "about.json"
    if stage.config.train.sft_steps and path.is_file():
        about = read_json(path)
        return about if about["of"] == _identity(stage) else {}
    return {}


def _identity(stage: "Stage") -> dict[str, Any]:
    """Return everything on which the weights after the warm-up depend."""
    settings = {k: v for k, v in flatten(stage.config).items() if k.startswith(SETTINGS)}
    for name in ("fast_inference", "gpu_memory_utilization", "unsloth_vllm_standby"):
        del settings[f"model.{name}"]
    form = load_rewards(stage.config.rewards).form.name
    return settings | {"form": form, "rows": sha256(stage.run / "data/sft.parquet")}


def _sentence(about: dict[str, Any]) -> str:
    if not about:
        return "no SFT warm-up (train.sft_steps = 0)"
    first, last = about["lines"][0], about["lines"][-1]
    return f"{last['step']} SFT warm-up steps: loss {first['loss']:.3f} → {last['loss']:.3f}"


def train_on(policy: Policy, stage: "Stage", rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Train the policy to write the completions of these rows; return each step's metrics.

    Args:
        policy: The policy.
        stage: The stage, with `train.sft_steps`.
        rows: Rows with prompt and completion, as `data.worked_rows` returns them.
    """
    from trl import SFTConfig, SFTTrainer  # Unsloth has to be imported before TRL

    # The prompts are rendered as for GRPO. TRL would render the whole chat and look for the prompt
    # in it, but the prompt may differ there if the template opens a thinking block.
    rows, config, gpu = list(rows), stage.config, cuda_available()
    as_example = _texts if any(images_of(row["prompt"]) for row in rows) else _ids
    dataset = as_dataset([as_example(policy.tokenizer, row) for row in rows])
    size = min(16, config.grpo.per_device_train_batch_size) // ranks.count()
    args = SFTConfig(
        output_dir=str(stage.run / "warm_up.log"),
        max_steps=config.train.sft_steps,
        learning_rate=config.train.sft_learning_rate,
        per_device_train_batch_size=max(1, size),
        seed=config.seed,
        max_length=config.model.max_seq_length,
        completion_only_loss=True,
        router_aux_loss_coef=0.0,
        gradient_checkpointing=gpu,
        use_cpu=not gpu,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    with adapter_in_fp32(policy.model):
        trainer = SFTTrainer(
            policy.model,
            args,
            train_dataset=dataset,
            processing_class=policy.processing_class,
        )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    return [{"step": line["step"], "loss": line["loss"]} for line in lines]


def _texts(tokenizer: "PreTrainedTokenizerBase", row: Row) -> dict[str, Any]:
    """Return a rendered prompt, its images, and its completion up to the stop token.

    For each micro-batch TRL inserts the tokens of the images into the prompt.
    """
    completion = row["completion"][0]["content"] + tokenizer.eos_token
    images = list(map(encode, images_of(row["prompt"])))
    return {"prompt": render(tokenizer, row["prompt"]), "completion": completion, "images": images}


def _ids(tokenizer: "PreTrainedTokenizerBase", row: Row) -> dict[str, list[int]]:
    """Encode a prompt and its completion up to the stop token; only the completion is learnt."""
    texts = list(_texts(tokenizer, row).values())[:2]
    prompt, completion = tokenizer(texts, add_special_tokens=False)["input_ids"]
    mask = [0] * len(prompt) + [1] * len(completion)
    return {"input_ids": prompt + completion, "completion_mask": mask}
