"""Does the guard find what is planted, and nothing else, and what does it cost?

    python benchmarks/guard.py    # about 6 minutes on 2 idle cores

Clean runs: four tasks, five seeds each, whose guard looks before steps 1, 4 and 7. Faults: those of
tests/sampling_faults.py, planted in a run of arithmetic, and looked at five times each. The cost is
that of the default: two looks in a run of 100 steps, by the median seconds of a look and of a step.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import statistics
import sys
import tempfile
import time

import torch
from pytest import MonkeyPatch

from grpo_nb import Guard, data, models, rewards, stages, training
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve

TASKS, SEEDS, LOOKS = ("math", "json_extraction", "qa", "summarization"), 5, 5
SETTINGS = {
    "grpo.max_steps": 7,
    "train.guard_steps": 3,
    "train.eval_steps": 0,
    "grpo.per_device_train_batch_size": 16,
}


def build(task: str, seed: int, **settings: object) -> stages.RunTrainer:
    config = resolve("tiny-cpu", {"task": task, "seed": seed} | SETTINGS | settings)
    run, chosen = Run(f"{task}-{seed}-{len(settings)}"), rewards.load_rewards(config.rewards)
    data.prepare_run(run, config.data, seed, lambda chats: [30] * len(chats), chosen)
    policy, stage = models.load_policy(config), Stage(run, "03", config)
    trainer = stages.build_trainer(policy, chosen, data.load(run, "train"), stage)
    trainer.guard = Guard(trainer, every=max(1, config.train.guard_steps))
    if not config.train.guard_steps:  # it is called by hand
        trainer.remove_callback(trainer.guard)
    return trainer


def clean() -> None:
    looks, alarms = [], 0
    for task in TASKS:
        found = []
        for seed in range(SEEDS):
            trainer = build(task, seed)
            try:
                trainer.train()
            except RuntimeError as error:
                alarms += 1
                print(error)
            found += trainer.guard.looks
        looks += found
        scores = " ".join(f"{one.score:.1f}" for one in found)
        print(
            f"{task}: {statistics.mean(one.tokens for one in found):.0f} tokens; {scores}",
            flush=True,
        )
    scores = [one.score for one in looks]
    print(
        f"{len(TASKS) * SEEDS} clean runs, {len(looks)} looks: {alarms} alarms; scores have mean "
        f"{statistics.mean(scores):.2f}, deviation {statistics.stdev(scores):.2f}, and the largest "
        f"is {max(map(abs, scores)):.1f}"
    )


def faults() -> None:
    from sampling_faults import FAULTS, leaves_tokens_out

    trainer = build("math", 0, **{"grpo.max_steps": 8})
    mild = {f"top_p {p}": (leaves_tokens_out(top_p=p), "") for p in (0.9, 0.95)}
    for name, (plant, _) in (FAULTS | mild).items():
        scores, alarms = [], 0
        with MonkeyPatch.context() as patch:
            trainer.samples_densely, trainer._dense = True, None
            plant(trainer, patch)
            for seed in range(LOOKS):
                torch.manual_seed(seed)
                try:
                    trainer.guard()
                except RuntimeError:
                    alarms += 1
                scores.append(f"{trainer.guard.looks[-1].score:.1f}")
        print(f"{name}: found {alarms} of {LOOKS}; {' '.join(scores)}", flush=True)


def cost() -> None:
    whole = {"grpo.per_device_train_batch_size": 64, "train.guard_steps": 0}
    trainer = build("math", 0, **whole)
    begun, steps, looks = time.process_time(), [], []

    def note(update: training.Update) -> None:
        nonlocal begun
        steps.append(time.process_time() - begun)
        before = time.process_time()
        trainer.guard()
        begun = time.process_time()
        looks.append(begun - before)

    trainer.monitor.watchers.append(note)
    trainer.train()
    step, look = statistics.median(steps[1:]), statistics.median(looks)
    share = 2 * look / (100 * step + 2 * look)
    print(f"a look {look:.2f} s, a step {step:.2f} s of one core: {share:.2%} of 100 steps")


def main() -> None:
    os.environ["GRPO_NB_RUNS"] = tempfile.mkdtemp()
    sys.path.insert(0, str(PROJECT_ROOT / "tests"))
    for part in sys.argv[1:] or ["cost", "faults", "clean"]:
        {"cost": cost, "faults": faults, "clean": clean}[part]()


if __name__ == "__main__":
    main()
