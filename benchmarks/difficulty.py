"""Do rows drawn by difficulty teach more? Against TRL's order, on a pool of which a part fits.

    python benchmarks/difficulty.py    # 5 seeds, two ways

The pool: sums without a carry, which the tiny base answers 89 % right when it samples (easy), sums
and differences with one (31 %: fitting), and sums of three digits (0 %: impossible). Every EVERY
steps PROMPTS held-out prompts of the fitting kind are answered greedily, outside of the time that
counts. Each training has a process of its own.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

TARGET, EVERY, PROMPTS, LONGEST = 0.75, 5, 128, 150
PLAIN = None
RIGHT = """from grpo_nb import rewards
reward_funcs = [rewards.numeric_correctness_reward]
"""
POOL = {"easy": 128, "fitting": 64, "impossible": 64}


def has_carry(row) -> bool:
    a, b = row["a"] % 10, row["b"] % 10
    return a + b > 9 if row["operator"] == "+" else a < b


def pool(seed: int, sizes):
    """Return the rows to train on, and held-out rows of the fitting kind."""
    from grpo_nb.machine import PROJECT_ROOT
    from grpo_nb.rewards.prompts import build_prompt

    rng = random.Random(seed)
    lines = (PROJECT_ROOT / "data/arithmetic.jsonl").read_text().splitlines()
    known = rng.sample([json.loads(line) for line in lines], len(lines))
    pairs = [(rng.randint(100, 999), rng.randint(100, 999)) for _ in range(1000)]
    kinds = {
        "easy": [row for row in known if not has_carry(row)],
        "fitting": [row for row in known if has_carry(row)],
        "impossible": [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs],
    }
    held_out = kinds["fitting"][-PROMPTS:]
    rows = [
        row | {"level": n}
        for n, (kind, size) in enumerate(sizes.items(), 1)
        for row in kinds[kind][:size]
    ]
    return [
        [
            {
                "prompt": build_prompt(row["question"]),
                "answer": row["answer"],
                "level": row.get("level", 0),
            }
            for row in each
        ]
        for each in (rng.sample(rows, len(rows)), held_out)
    ]


def train(way: str, seed: int, options) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        from transformers import TrainerCallback

        from grpo_nb import models, rewards, stages
        from grpo_nb.runs import Run, Stage
        from grpo_nb.runs.config import resolve
        from grpo_nb.training import difficulty

        global PLAIN
        PLAIN = PLAIN or difficulty.Difficulty.weights

        settings = {
            "seed": seed,
            "train.eval_steps": 0,
            "train.guard_steps": 0,
            "grpo.max_steps": options.steps,
            "grpo.per_device_train_batch_size": options.batch,
            "grpo.learning_rate": options.rate,
            "grpo.num_generations": 8,
        }
        config = resolve("tiny-cpu", settings)
        sizes = dict(zip(POOL, options.pool))
        rows, held_out = pool(seed, sizes)
        preset = Path(folder) / "right.py"
        preset.write_text(RIGHT)
        if way != "levels":
            rows = [{k: v for k, v in row.items() if k != "level"} for row in rows]
        chosen, policy = rewards.load_preset(str(preset)), models.load_policy(config)
        trainer = stages.build_trainer(policy, chosen, rows, Stage(Run("benchmark"), "03", config))
        if way != "uniform":
            difficulty.difficulty(trainer, chosen.correct_func.__name__)
            import ways

            difficulty.Difficulty.weights = ways.WAYS.get(way, PLAIN)
        answers = [row["answer"] for row in held_out]

        def accuracy() -> float:
            groups = policy.generate([row["prompt"] for row in held_out], max_completion_length=48)
            texts = [group[0].text for group in groups]
            return statistics.mean(chosen.reward_funcs[0](completions=texts, answer=answers))

        curve = []

        class Watch(TrainerCallback):
            spent = 0.0

            def on_step_begin(self, args, state, control, **kwargs):
                self.started = time.process_time()

            def on_step_end(self, args, state, control, **kwargs):
                self.spent += time.process_time() - self.started
                if state.global_step % EVERY == 0:
                    curve.append((state.global_step, self.spent, accuracy()))
                    if curve[-1][2] >= TARGET:
                        control.should_training_stop = True

        trainer.add_callback(Watch())
        trainer.train()
        lines = [line for line in trainer.state.log_history if "frac_reward_zero_std" in line]
        key = "rewards/" + chosen.correct_func.__name__ + "/group_std"
        signal = [1 - line["frac_reward_zero_std"] for line in lines]
        return {
            "way": way,
            "seed": seed,
            "curve": curve,
            "signal": signal,
            "std": [line.get(key) for line in lines],
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=LONGEST)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--pool", type=int, nargs=3, default=list(POOL.values()))
    parser.add_argument("--ways", nargs="+", default=["uniform", "product"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    sys.path.insert(0, "/tmp/b51")
    out = sys.stdout
    sys.stdout = sys.stderr
    for seed in options.seeds:
        for way in options.ways:
            print(json.dumps(train(way, seed, options)), file=out, flush=True)
