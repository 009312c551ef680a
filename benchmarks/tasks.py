"""Does GRPO raise each task on its tiny base? The table in data/task_base/README.md.

    python benchmarks/tasks.py                       # 1 to 4 minutes a task on 2 cores
    python benchmarks/tasks.py --tasks qa --set train.max_steps=40

For each task: accuracy (the mean of the preset's first reward) and format, greedy and
sampled, on held-out rows, of the 4-bit base and of the adapter trained on the other rows.
"""

import argparse
import time
from collections.abc import Mapping

import pandas as pd

from grpo_nb import evaluate, models, training
from grpo_nb.config import RunConfig, parse_assignment, resolve
from grpo_nb.data import read_jsonl, split_rows
from grpo_nb.prompts import build_prompt
from grpo_nb.rewards import RewardSet, load_preset
from grpo_nb.runs import Run, Stage, project_path

TASKS = ("code", "summarization", "qa", "json_extraction")
SETTINGS = {
    "data.eval_rows": 128,
    "data.max_prompt_tokens": 64,
    "model.model_path": "data/task_base",
    "model.max_seq_length": 96,
    "train.max_steps": 60,
    "train.max_completion_length": 32,
}


def read_task(task: str, preset: RewardSet, config: RunConfig) -> tuple[list[dict], list[dict]]:
    """(train, eval) rows with their prompts."""
    rows = read_jsonl(project_path(f"data/tasks/{task}.jsonl"))
    prompted = [{"prompt": build_prompt(r["question"], preset.system_prompt), **r} for r in rows]
    return split_rows(prompted, config.data.eval_rows, config.seed)


def train_task(task: str, settings: Mapping[str, object]) -> pd.DataFrame:
    """Train on one task; returns a line a decoding and model, with the seconds of training."""
    preset = load_preset(task)
    config = resolve("tiny-cpu", SETTINGS, settings)
    train_rows, held_out = read_task(task, preset, config)
    run = Run(f"tasks-{task}")
    policy = models.load_policy(config.model, config.seed)
    started = time.monotonic()
    trainer = training.build_trainer(policy, preset, train_rows, config, run)
    training.train(trainer, Stage(run, "03", config, {}))
    seconds = time.monotonic() - started
    training.save_adapter(trainer, policy, run)
    samples = {}
    for name, adapter in (("base", None), ("adapter", run / "train/adapter")):
        model = models.load_checkpoint(
            config.model.model_path, adapter=adapter, quantization="4bit"
        )
        samples[name] = evaluate.evaluate_model(model, policy.tokenizer, held_out, preset, config)
    return evaluate.compare(samples).assign(task=task, seconds=round(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    settings = dict(map(parse_assignment, options.set))
    for task in options.tasks:
        lines = train_task(task, settings)
        table = lines[["task", "decoding", "model", "accuracy", "format", "seconds"]]
        print(table.round(3).to_string(index=False), flush=True)


if __name__ == "__main__":
    main()
