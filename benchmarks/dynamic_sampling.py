"""Does it pay to draw groups without signal anew? Learning by step and by second.

    python benchmarks/dynamic_sampling.py                        # math, 3 seeds, 12 trainings
    python benchmarks/dynamic_sampling.py --task qa --steps 60

Trainings of the tiny base with 0, 1, 2 and 3 rounds take turns. Every EVERY steps the policy
answers held-out prompts greedily. Time is the processor's, which other programs disturb less than
the clock, and without those validations. What is printed is the mean over the seeds; "to 75 %" is
interpolated between two validations.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import itertools
import statistics
import tempfile
import time

ROUNDS, EVERY, PROMPTS = (0, 1, 2, 3), 5, 128


def watched(trainer, validation):
    """Train; a line a step: its reward and shares, processor seconds, accuracy where asked."""
    from transformers import TrainerCallback

    lines = [{"seconds": 0.0, "accuracy": validation.accuracy()}]
    started, clock = time.process_time(), time.perf_counter()

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            nonlocal started, clock
            if not logs or "reward" not in logs:
                return
            now, at = time.process_time(), time.perf_counter()
            names = ("reward", "frac_reward_zero_std", "dynamic/replaced", "dynamic/without_signal")
            line = {name: logs.get(name, 0.0) for name in names}
            lines.append(line | {"seconds": now - started, "clock": at - clock})
            if state.global_step % EVERY == 0:
                lines[-1]["accuracy"] = validation.accuracy()
                started += time.process_time() - now
                clock += time.perf_counter() - at

    trainer.add_callback(Watch())
    trainer.train()
    return lines


def train(task: str, seed: int, rounds: int, steps: int, folder: str) -> list[dict]:
    from grpo_nb import data, models, rewards, training
    from grpo_nb.config import resolve
    from grpo_nb.runs import Run
    from grpo_nb.training.validation import Validation

    class Heldout(Validation):
        def accuracy(self):
            return self()["eval/accuracy"]

    settings = {"train.dynamic_sampling": rounds, "train.max_steps": steps, "seed": seed}
    config, run = resolve("tiny-cpu", {"task": task}, settings), Run(f"{task}-{seed}")
    chosen = rewards.load_preset(config.rewards.preset)
    if not (run / "data/train.parquet").exists():
        count = lambda chats: [30] * len(chats)  # noqa: E731
        data.prepare(run, config.data, seed, count, reference=chosen.reference)
    policy = models.load_policy(config.model, seed, config.policy)
    heldout = Heldout(policy, data.load(run, "eval")[:PROMPTS], chosen, config)
    trainer = training.build_trainer(policy, chosen, data.load(run, "train"), config, folder)
    return watched(trainer, heldout)


def seconds_to(lines: list[dict], mark: float) -> tuple[float, float]:
    """(steps, processor seconds) until the accuracy; infinite where it was not reached."""
    known = [
        (step, one["seconds"], one["accuracy"])
        for step, one in enumerate(lines)
        if "accuracy" in one
    ]
    for (a, s, low), (b, t, high) in itertools.pairwise(known):
        if low < mark <= high:
            share = (mark - low) / (high - low)
            return a + share * (b - a), s + share * (t - s)
    return float("inf"), float("inf")


def summary(found: dict[int, list[list[dict]]], steps: int, mark: float) -> None:
    mean = statistics.mean
    thirds = [range(1 + n * steps // 3, 1 + (n + 1) * steps // 3) for n in range(3)]
    heads = ["rounds", "replaced", "left", "processor s a step", "clock s a step"]
    heads += [f"reward, steps {part[0]} to {part[-1]}" for part in thirds]
    heads += [f"steps to {mark:.0%}", f"processor s to {mark:.0%} (each seed)", "last accuracy"]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for rounds, runs in found.items():
        steps_of = [run[1:] for run in runs]
        cells = [str(rounds)]
        for name in ("dynamic/replaced", "dynamic/without_signal"):
            cells.append(f"{mean(one[name] for run in steps_of for one in run):.0%}")
        cells += [f"{mean(run[-1][k] / steps for run in runs):.2f}" for k in ("seconds", "clock")]
        for part in thirds:
            cells.append(f"{mean(run[step]['reward'] for run in runs for step in part):.2f}")
        reached = [seconds_to(run, mark) for run in runs]
        cells.append(f"{mean(n for n, _ in reached):.1f}")
        each = ", ".join(f"{seconds:.1f}" for _, seconds in reached)
        cells.append(f"{mean(seconds for _, seconds in reached):.1f} ({each})")
        cells.append(f"{mean(run[-1]['accuracy'] for run in runs):.1%}")
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="math")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--mark", type=float, default=0.75, help="accuracy to reach")
    args = parser.parse_args()
    found: dict[int, list[list[dict]]] = {rounds: [] for rounds in ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        for seed in range(args.seeds):
            for rounds in ROUNDS:
                found[rounds].append(train(args.task, seed, rounds, args.steps, folder))
                accuracies = [f"{x['accuracy']:.2f}" for x in found[rounds][-1] if "accuracy" in x]
                print(f"seed {seed}, {rounds} rounds: {' '.join(accuracies)}", flush=True)
            print(f"load {os.getloadavg()[0]:.1f}")
        summary(found, args.steps, args.mark)


if __name__ == "__main__":
    main()
