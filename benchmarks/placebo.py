"""Did the reward do it? True and random rewards against their placebos, on the tiny model.

    python benchmarks/placebo.py math --seeds 5             # and a placebo with shuffled rewards
    python benchmarks/placebo.py summarization --seeds 1    # another task's own rewards
    python benchmarks/placebo.py random --seeds 20 --steps 30

What a random reward pays hangs on the text alone, and its verdict should never say that the reward
caused anything. Stages run in this process, without notebooks, by the same trainer, evaluation and
comparison. What is done already, in runs/placebo-*, is not done again.
"""

import argparse
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pandas as pd

import grpo_nb
from grpo_nb import data, evaluation, export, models, runs, stages
from grpo_nb.models import template
from grpo_nb.pipeline import caused
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import Run, runs_root
from grpo_nb.runs.config import TASKS

RANDOM = """import random

from grpo_nb.rewards import PRESETS


def random_reward(prompts, completions, **_):
    said = [f"{p[-1]['content']} {c[-1]['content']}" for p, c in zip(prompts, completions)]
    return [random.Random(text).random() for text in said]


reward_funcs = [*PRESETS["math"].reward_funcs, random_reward]
reward_weights = [*PRESETS["math"].reward_weights, 1.0]
"""
TRAINED = ("train/adapter", "train/metrics.jsonl")


def settings_of(reward: str, seed: int, steps: int) -> dict[str, Any]:
    """The demo's, with one sample a prompt: verdicts are on greedy answers."""
    chosen = {"seed": seed, "grpo.max_steps": steps, "evaluate.samples": 1}
    chosen["task"] = "math" if reward == "random" else reward
    if reward == "random":  # answers are still judged by the first reward, which pays nothing
        file = runs_root() / "placebo-random.py"
        chosen |= {"rewards.preset": str(file), "rewards.reward_weights": "0, 0, 0, 0, 1"}
    return chosen


def prepare(name: str, settings: dict[str, Any], profile: str = "tiny-cpu") -> None:
    stage = runs.start("01", name, settings, profile=profile, all_stages=True)
    config = stage.config
    count = partial(template.count_tokens, models.load_tokenizer(config.model.model_name))
    data.prepare_run(stage.run, config.data, config.seed, count, load_rewards(config.rewards))
    stage.finish("data")
    runs.start("02", name, settings, all_stages=True).finish()


def train(name: str, settings: dict[str, Any], *watchers: Any) -> stages.RunTrainer:
    stage = runs.start("03", name, settings, all_stages=True)
    config, chosen = stage.config, load_rewards(stage.config.rewards)
    policy = models.load_policy(config)
    trainer = stages.build_trainer(policy, chosen, data.load(stage.run, "train"), stage)
    for watcher in watchers:
        trainer.monitor.watchers.append(watcher)
    trainer.train()
    policy.close()
    stage.finish(*TRAINED)
    return trainer


def evaluate(name: str, settings: dict[str, Any]) -> None:
    stage = runs.start("04", name, settings, all_stages=True)
    config = stage.config
    base, policy, adapter = export.trained_paths(stage.run, config)
    compared = {"base": base, "adapter": (policy, adapter)}
    rows = data.load(stage.run, "eval")
    evaluation.save(stage.run, grpo_nb.evaluate(compared, rows, **evaluation.options(config)))
    stage.finish("eval")


def right_and_formed(run: Run) -> float:
    """The share of greedy answers that are right and in full form."""
    lines = pd.read_parquet(run / "eval/samples.parquet").query("model == 'adapter'")
    lines = lines[lines["decoding"] == "greedy"]
    return (lines["correct"] & (lines["format"] == 1)).mean()


def run_both(name: str, settings: dict[str, Any], kind: str = "shuffled") -> list[Run]:
    """Return a run and its placebo, which are made unless they are there."""
    pair = [Run(name), Run(f"{name}-{kind}")]
    for run, more in zip(pair, ({}, {"train.placebo": kind}), strict=True):
        if run.undone():
            prepare(run.name, settings)
            train(run.name, settings | more)
            evaluate(run.name, settings)
    return pair


def measure(reward: str, steps: int, seed: int) -> dict[str, Any]:
    """A run and its placebo; the line of the table."""
    name, settings = f"placebo-{reward}-{seed}", settings_of(reward, seed, steps)
    run, placebo = run_both(name, settings)
    found = caused.compare(run, placebo)
    change = found.pair["differences"]["accuracy"]
    points = [100 * x for x in (change["difference"], *change["interval"])]
    line = {"seed": seed, "verdict": found.verdict, "points": points, "said": found.sentence}
    line["formed"] = 100 * (right_and_formed(run) - right_and_formed(placebo))
    print(json.dumps(line), flush=True)
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reward", choices=("random", *TASKS), help="random, or those of a task")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    asked = parser.parse_args()
    runs_root().mkdir(parents=True, exist_ok=True)
    (runs_root() / "placebo-random.py").write_text(RANDOM, encoding="utf-8")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, mp_context=spawn) as pool:
        one = partial(measure, asked.reward, asked.steps)
        lines = list(pool.map(one, range(asked.seeds)))
    print(
        "| seed | run − placebo in accuracy, points (95 %) | right and in form, points | verdict |"
    )
    print("|---|---|---|---|")
    for line in lines:
        points, low, high = line["points"]
        print(f"| {line['seed']} | {points:+.1f} ({low:+.1f} … {high:+.1f})", end=" | ")
        print(f"{line['formed']:+.1f} | {line['verdict']} |")
    print(json.dumps(Counter(line["verdict"] for line in lines)))


if __name__ == "__main__":
    main()
