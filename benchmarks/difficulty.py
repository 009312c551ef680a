"""Do rows that are drawn by difficulty teach more than TRL's order? The table in docs/data.md.

    python benchmarks/difficulty.py    # 5 seeds, two pools, three ways; about 8 minutes, idle

A pool holds three kinds of rows in any order. Sums without a carry are easy: the tiny base answers
89 % right when it samples. Sums and differences with a carry fit: 31 %. Sums of three digits are
impossible. Only a right answer is paid. Every EVERY steps PROMPTS held-out rows of the kind that
fits are answered greedily, outside of the time that counts, until TARGET are right. Each training
has a process of its own.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import importlib
import itertools
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

TARGET, EVERY, PROMPTS, LONGEST = 0.75, 5, 64, 150
KINDS = ("easy", "fits", "impossible")
POOLS = {"1/16 of 256 rows fits": (32, 16, 208), "1/4 of 64 rows fits": (24, 16, 24)}
WAYS = {
    "TRL's order": "uniform",
    "`difficulty(trainer)`": "difficulty",
    "the same, kinds as levels 1 to 3": "levels",
}
RIGHT = """from grpo_nb import rewards
reward_funcs = [rewards.numeric_correctness_reward]
"""
SETTINGS = {
    "train.eval_steps": 0,
    "train.guard_steps": 0,
    "grpo.max_steps": LONGEST,
    "grpo.per_device_train_batch_size": 16,
    "grpo.num_generations": 8,
    "grpo.learning_rate": 4e-4,
}
Row = dict[str, Any]


def has_carry(row: Row) -> bool:
    a, b = row["a"] % 10, row["b"] % 10
    return a + b > 9 if row["operator"] == "+" else a < b


def rows_of(pool: str, seed: int) -> tuple[list[Row], list[Row]]:
    """Return the rows to train on, and held-out rows of the kind that fits."""
    from grpo_nb.machine import PROJECT_ROOT
    from grpo_nb.rewards.prompts import build_prompt

    draw = random.Random(seed)
    lines = (PROJECT_ROOT / "data/arithmetic.jsonl").read_text(encoding="utf-8").splitlines()
    shipped = draw.sample([json.loads(line) for line in lines], len(lines))
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(POOLS[pool][-1])]
    kinds = {
        "easy": [row for row in shipped if not has_carry(row)],
        "fits": [row for row in shipped if has_carry(row)],
        "impossible": [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs],
    }

    def prepared(kind: str, part: slice) -> list[Row]:
        return [
            {"prompt": build_prompt(row["question"]), "answer": row["answer"]}
            | {"level": KINDS.index(kind) + 1}
            for row in kinds[kind][part]
        ]

    sizes = zip(KINDS, POOLS[pool], strict=True)
    rows = [row for kind, size in sizes for row in prepared(kind, slice(size))]
    return draw.sample(rows, len(rows)), prepared("fits", slice(-PROMPTS, None))


def train(pool: str, way: str, seed: int) -> dict[str, float]:
    """Return steps, seconds of the processor, and groups with signal until the target."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        from transformers import TrainerCallback

        from grpo_nb import models, rewards, stages
        from grpo_nb.runs import Run, Stage
        from grpo_nb.runs.config import resolve

        (Path(folder) / "right.py").write_text(RIGHT, encoding="utf-8")
        chosen = rewards.load_preset(f"{folder}/right.py")
        how = {"seed": seed, "train.difficulty": way != "uniform"}
        config = resolve("tiny-cpu", SETTINGS, how)
        policy, (rows, held_out) = models.load_policy(config), rows_of(pool, seed)
        if way != "levels":
            rows = [{name: row[name] for name in ("prompt", "answer")} for row in rows]
        trainer = stages.build_trainer(policy, chosen, rows, Stage(Run("benchmark"), "03", config))
        answers = [row["answer"] for row in held_out]

        def accuracy() -> float:
            groups = policy.generate([row["prompt"] for row in held_out], max_completion_length=48)
            texts = [group[0].text for group in groups]
            return statistics.mean(chosen.reward_funcs[0](completions=texts, answer=answers))

        class Watch(TrainerCallback):
            spent = 0.0

            def on_step_begin(self, args, state, control, **kwargs):
                self.started = time.process_time()

            def on_step_end(self, args, state, control, **kwargs):
                self.spent += time.process_time() - self.started
                if state.global_step % EVERY == 0 and accuracy() >= TARGET:
                    control.should_training_stop = True

        watch = Watch()
        trainer.add_callback(watch)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "frac_reward_zero_std" in line]
    signal = 1 - statistics.mean(line["frac_reward_zero_std"] for line in lines)
    return {"steps": trainer.state.global_step, "seconds": watch.spent, "signal": signal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(parser.parse_args().seeds)
    importlib.import_module("grpo_nb.stages.trainer")  # once for all processes, which are forked
    print(
        f"| pool | rows | groups with signal | steps to 75 %, {LONGEST} at most | processor [s] |"
    )
    print("|---|---|---|---|---|", flush=True)
    for pool, (name, way) in itertools.product(POOLS, WAYS.items()):
        options = {"maxtasksperchild": 1, "initializer": os.dup2, "initargs": (2, 1)}  # its output
        with multiprocessing.get_context("fork").Pool(1, **options) as process:
            runs = process.starmap(train, [(pool, way, seed) for seed in seeds], chunksize=1)
        signal, seconds, mean = (
            statistics.mean(run[key] for run in runs) for key in ("signal", "seconds", "steps")
        )
        steps = ", ".join(str(run["steps"]) for run in runs)
        line = f"| {pool} | {name} | {signal:.0%} | {steps}; mean {mean:.0f} | {seconds:.1f} |"
        print(line, flush=True)


if __name__ == "__main__":
    main()
