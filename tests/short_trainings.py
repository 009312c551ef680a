"""Trains the tiny base for two steps in several ways, in a process of its own.

`python short_trainings.py BACKEND` trains in GRPO_NB_RUNS, and writes report.json there. Importing
unsloth patches TRL for good, so the backends cannot share a process.
"""

import json
import sys

from trainings import comparable, trainer_of

from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, runs_root

PROMPTS = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9), (3, 4))]
SETTINGS = {
    "grpo.max_steps": 2,
    "grpo.learning_rate": 1e-2,
    "grpo.warmup_steps": 0,
    "grpo.per_device_train_batch_size": 16,
    "grpo.max_completion_length": 40,
    "train.eval_steps": 0,
    "train.guard_steps": 0,
    "policy.rollouts": "model",
}
CASES = {
    "4bit": {"grpo.gradient_checkpointing": True},
    "16bit": {"model.load_in_4bit": False},
    "full": {"model.load_in_4bit": False, "model.full_finetuning": True},
    "asked": {"grpo.gradient_checkpointing": True},  # while it trains, the policy is asked
}


def train(name, **settings):
    rows = [{"prompt": prompt, "answer": "85"} for prompt in PROMPTS]
    one, texts, answers = trainer_of(Run(name), rows=rows, **SETTINGS | settings), [], []

    def look(update):
        texts.append([each["completion"] for each in update.completions])
        if name == "asked":
            one.policy.generate(PROMPTS, max_completion_length=24, temperature=1.0, seed=7)
            groups = one.policy.generate(PROMPTS, max_completion_length=48)
            answers[:] = [group[0].text for group in groups]

    one.monitor.watchers.append(look)
    trained = [p for p in one.policy.model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    one.train()
    moved = sum(float((a - b).norm()) for a, b in zip(trained, before, strict=True))
    report = {"metrics": comparable(one.stage.run), "texts": texts, "moved": moved}
    return report | {"answers": answers}


def main(backend):
    report = {
        name: train(name, **settings, **{"policy.backend": backend})
        for name, settings in CASES.items()
    }
    report["unsloth imported"] = "unsloth" in sys.modules
    (runs_root() / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
