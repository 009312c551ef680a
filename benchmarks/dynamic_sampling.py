"""Does it pay to draw groups without signal anew? Learning by step and by second.

    python benchmarks/dynamic_sampling.py                        # math, 3 seeds, 12 trainings

Trainings of the tiny base with 0, 1, 2 and 3 rounds take turns. Time is the processor's, which
other programs disturb less than the clock. No prompt comes twice in so few steps, so reward and
accuracy of a step's first draw are those of prompts that the policy was not trained on. The mark
is reached at the first step whose sampled accuracy, averaged with the two before, is that high;
at the end held-out prompts are answered greedily.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import statistics
import tempfile
import time

ROUNDS, PROMPTS = (0, 1, 2, 3), 64
SHARES = ("dynamic/replaced", "dynamic/without_signal")


def watched(trainer) -> list[dict]:
    """Train; the metrics of each step, and processor and clock seconds until its end."""
    from transformers import TrainerCallback

    lines, started, clock = [], time.process_time(), time.perf_counter()

    class Watch(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "reward" in logs:
                now = {"processor": time.process_time() - started}
                lines.append(logs | now | {"clock": time.perf_counter() - clock})

    trainer.add_callback(Watch())
    trainer.train()
    return lines


def train(task: str, seed: int, rounds: int, args, folder: str) -> dict[str, float]:
    """A line of the table."""
    from grpo_nb import data, models, rewards, training
    from grpo_nb.runs import Run
    from grpo_nb.runs.config import resolve
    from grpo_nb.training.validation import Validation

    settings = {"train.dynamic_sampling": rounds, "train.max_steps": args.steps, "seed": seed}
    config, run = resolve("tiny-cpu", {"task": task}, settings), Run(f"{task}-{seed}")
    chosen = rewards.load_preset(config.rewards.preset)
    if not (run / "data/train.parquet").exists():
        count = lambda chats: [30] * len(chats)  # noqa: E731
        told = {"preset_prompt": chosen.system_prompt, "reference": chosen.reference}
        data.prepare(run, config.data, seed, count, **told)
    policy = models.load_policy(config.model, seed, config.policy)
    trainer = training.build_trainer(policy, chosen, data.load(run, "train"), config, folder)
    lines = watched(trainer)
    heldout = Validation(policy, data.load(run, "eval")[:PROMPTS], chosen, config)()
    mean, third = statistics.mean, args.steps // 3
    found = {name: mean(line.get(name, 0.0) for line in lines) for name in SHARES}
    for name in ("processor", "clock"):
        found[f"{name} s a step"] = lines[-1][name] / args.steps
    for start in (0, third, args.steps - third):
        part = lines[start : start + third]
        found[f"reward {start + 1} to {start + third}"] = mean(line["reward"] for line in part)
    right = [line[f"rewards/{chosen.names[0]}/mean"] for line in lines]
    smooth = [mean(right[max(0, end - 3) : end]) for end in range(1, len(right) + 1)]
    step = next((n for n, value in enumerate(smooth) if value >= args.mark), None)
    found[f"steps to {args.mark:.0%}"] = float("inf") if step is None else step + 1
    at = float("inf") if step is None else lines[step]["processor"]
    return found | {f"processor s to {args.mark:.0%}": at, "held-out": heldout["eval/accuracy"]}


def row(name: str, found: dict[str, float]) -> str:
    return " | ".join([f"| {name}", *(f"{value:.2f}" for value in found.values())]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="math")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--mark", type=float, default=0.75, help="accuracy to reach")
    args = parser.parse_args()
    found: dict[int, list[dict[str, float]]] = {rounds: [] for rounds in ROUNDS}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        for seed in args.seeds:
            for rounds in ROUNDS:
                found[rounds].append(train(args.task, seed, rounds, args, folder))
                if len(found[0]) == 1 and not rounds:
                    heads = ["seed, rounds", *found[0][0]]
                    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
                print(row(f"{seed}, {rounds}", found[rounds][-1]), flush=True)
    for rounds, runs in found.items():
        means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
        print(row(f"mean, {rounds}", means))
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
