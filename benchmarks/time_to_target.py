"""How long until the tiny model is right on 75 % of held-out prompts, against Unsloth and TRL.

    python benchmarks/time_to_target.py    # 3 seeds, three ways; about six minutes, idle

The same model, rows, batch, rewards and learning rate; every EVERY steps PROMPTS held-out prompts
are answered greedily, outside of the time that counts. Each training has a process of its own.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time

from step import build

TARGET, EVERY, LONGEST, PROMPTS = 0.75, 5, 100, 128
WAYS = {
    "Unsloth + TRL, defaults": "unsloth",
    "TRL, 16-bit LoRA, defaults": "transformers",
    "ours": "ours",
}
SCHEDULE = {"learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup"}


def train(way: str, seed: int) -> dict[str, float]:
    """Steps and seconds (clock, processor) of training until the target is reached."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        trainer, policy, rows, chosen = build(way, [], folder, LONGEST, seed=seed, **SCHEDULE)
        from transformers import TrainerCallback

        rows, expected = rows[:PROMPTS], [row["answer"] for row in rows[:PROMPTS]]

        def accuracy() -> float:
            prompts = [row["prompt"] for row in rows]
            groups = policy.generate(prompts, max_completion_length=48)
            texts = [group[0].text for group in groups]
            return statistics.mean(chosen.reward_funcs[0](completions=texts, answer=expected))

        class Watch(TrainerCallback):
            spent, reached = (0.0, 0.0), None

            def on_step_begin(self, args, state, control, **kwargs):
                self.started = time.perf_counter(), time.process_time()

            def on_step_end(self, args, state, control, **kwargs):
                now = time.perf_counter(), time.process_time()
                self.spent = tuple(
                    s + b - a for s, a, b in zip(self.spent, self.started, now, strict=True)
                )
                if state.global_step % EVERY == 0 and accuracy() >= TARGET:
                    self.reached, control.should_training_stop = state.global_step, True

        watch = Watch()
        trainer.add_callback(watch)
        trainer.train()
    if watch.reached is None:
        raise SystemExit(f"{way}, seed {seed}: not reached in {LONGEST} steps")
    clock, processor = watch.spent
    return {"steps": watch.reached, "clock": clock, "processor": processor}


def measured(way: str, seed: int) -> dict[str, float]:
    """`train`, in a process of its own."""
    command = [sys.executable, __file__, "--way", way, "--seed", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--way", default="", help="internal: what this process trains")
    parser.add_argument("--seed", type=int, default=0, help="internal: with this seed")
    arguments = parser.parse_args()
    if arguments.way:
        return print(json.dumps(train(arguments.way, arguments.seed)))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| to 75 % held-out | seed | steps | clock [s] | processor [s] | against ours |")
    print("|---|---|---|---|---|---|", flush=True)
    for seed in range(arguments.seeds):
        found = {name: measured(way, seed) for name, way in WAYS.items()}
        for name, one in found.items():
            ratio = one["processor"] / found["ours"]["processor"]
            print(
                f"| {name} | {seed} | {one['steps']} | {one['clock']:.1f} "
                f"| {one['processor']:.1f} | {ratio:.2f} × |",
                flush=True,
            )


if __name__ == "__main__":
    main()
