"""Trains the tiny base for three steps in several ways, in a process of its own.

`python short_trainings.py BACKEND FOLDER` writes FOLDER/report.json and FOLDER/adapter. Importing
unsloth patches TRL for good, so the backends cannot share a process.
"""

import json
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import TrainerCallback

from grpo_nb import models
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs.config import ModelConfig, PolicyConfig

PROMPTS = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9), (3, 4))]
STEPS = 3
TIMES = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


class AnswerEachStep(TrainerCallback):
    """Asks the policy while it is being trained; its answers after the last step are kept."""

    def __init__(self, policy):
        self.policy = policy

    def on_step_end(self, args, state, control, **kwargs):
        self.policy.generate(PROMPTS, max_completion_length=24, temperature=1.0, seed=7)
        self.answers = self.policy.generate(PROMPTS, max_completion_length=48)


def policy(backend, quantization, finetuning="lora"):
    config = PolicyConfig(backend=backend, finetuning=finetuning)
    return models.load_policy(ModelConfig(quantization=quantization), 0, config)


def train(policy, folder, *, checkpointing=False, answer=False, callbacks=()):
    from trl import GRPOConfig, GRPOTrainer

    preset = load_preset("math")
    texts = []

    def keep(completions, **columns):
        texts.append([one[0]["content"] for one in completions])
        return [0.0] * len(completions)

    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        learning_rate=1e-2,
        per_device_train_batch_size=16,
        num_generations=8,
        max_completion_length=40,
        gradient_checkpointing=checkpointing,
        use_cpu=not models.cuda_available(),
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        seed=0,
    )
    rows = [{"prompt": prompt, "answer": "85"} for prompt in PROMPTS]
    asking = AnswerEachStep(policy)
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=[*preset.reward_funcs, keep],
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[asking, *callbacks] if answer else [*callbacks],
    )
    trainable = [p for p in policy.model.parameters() if p.requires_grad]
    for parameter in trainable:
        parameter.data = parameter.data.to(torch.float32)
    before = [p.detach().clone() for p in trainable]
    trainer.train()
    moved = sum(float((a - b).norm()) for a, b in zip(trainable, before, strict=True))
    lines = [line for line in trainer.state.log_history if "reward" in line]
    return {
        "metrics": [{k: v for k, v in line.items() if k not in TIMES} for line in lines],
        "texts": texts,
        "moved": moved,
        "answers": [group[0].text for group in asking.answers] if answer else None,
    }


def main(backend, folder):
    report = {
        "4bit": train(policy(backend, "4bit"), folder, checkpointing=True),
        "16bit": train(policy(backend, "16bit"), folder),
        "full": train(policy(backend, "16bit", "full"), folder),
    }
    asked = policy(backend, "4bit")
    report["asked"] = train(asked, folder, checkpointing=True, answer=True)
    asked.model.save_pretrained(folder / "adapter", selected_adapters=["default"])
    report["unsloth imported"] = "unsloth" in sys.modules
    (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
