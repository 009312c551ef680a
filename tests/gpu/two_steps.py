"""Trains the tiny base for two steps with the given settings, in a process of its own.

`python two_steps.py SETTINGS.json FOLDER` writes FOLDER/report.json. Importing unsloth patches TRL
for good, and vLLM keeps its memory, so the cases cannot share a process.
"""

import json
import sys
from pathlib import Path

import torch

from grpo_nb import models, stages
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.training.preflight import dry_run

SIZES = {"grpo.max_steps": 2, "grpo.per_device_train_batch_size": 16}
BASE_ACCURACY = (0.45, 0.72)  # of the tiny base on 128 held-out rows, by engine: 0.59 on a CPU
PROMPTS = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9), (3, 4))]


def answers(policy):
    return [group[0].text for group in policy.generate(PROMPTS, max_completion_length=48)]


def checkpoint_flags(model, work):
    """Return, for each pass with gradients through a decoder layer, if it was checkpointed."""
    flags = []

    def look(layer, inputs):
        if torch.is_grad_enabled() and layer.training:
            flags.append(bool(layer.gradient_checkpointing))

    layers = [m for m in model.modules() if hasattr(m, "self_attn") and hasattr(m, "mlp")]
    hook = layers[0].register_forward_pre_hook(look)
    work()
    hook.remove()
    return flags


def report(policy, config, run):
    """Train for two steps in that run, and return what a test looks at."""
    before = answers(policy)
    rows = [{"prompt": prompt, "answer": "85"} for prompt in PROMPTS]
    rewards, stage = load_preset("math"), Stage(run, "03", config)
    trainer = stages.build_trainer(policy, rewards, rows, stage)
    built = answers(policy)
    flags = checkpoint_flags(policy.model, lambda: dry_run(trainer, dict(trainer.train_dataset[0])))
    trained = [weight for weight in policy.model.parameters() if weight.requires_grad]
    start = [weight.detach().clone() for weight in trained]
    in_training = checkpoint_flags(policy.model, trainer.train)
    moved = sum(float((a - b).norm()) for a, b in zip(trained, start, strict=True))
    with torch.no_grad():  # two steps change few greedy answers
        for name, weight in policy.model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    engine = getattr(policy.model, "vllm_engine", None)
    model_config = engine and engine.llm_engine.vllm_config.model_config
    steps = [line for line in trainer.state.log_history if "reward" in line]
    return {
        "gradients": [line["grad_norm"] for line in steps],
        "moved": moved,
        "answers": [before, answers(policy)],
        "answers as the trainer was built": built,
        "checkpointed": {"preflight": flags, "training": in_training},
        "vllm": policy.vllm,
        "sleeps": bool(model_config and model_config.enable_sleep_mode),
        "shares prompts": trainer.share_prompts,
        "trained in": sorted({str(weight.dtype) for weight in trained}),
    }


def judge(report):
    """Assert what holds for each case."""
    assert len(report["gradients"]) == 2 and min(report["gradients"]) > 0
    assert report["moved"] > 0 and report["trained in"] == ["torch.float32"]
    for of_step in report["checkpointed"].values():
        assert set(of_step) == {True}
    before, after = report["answers"]
    assert report["answers as the trainer was built"] == before
    assert after != before


def main(settings, folder):
    config = resolve("tiny-cpu", SIZES, json.loads(settings))
    policy = models.load_policy(config)
    text = json.dumps(report(policy, config, Run("two")))
    (folder / "report.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
