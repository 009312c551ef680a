"""What our part of a training costs beside TRL's own, and how fast a validation is.

    python benchmarks/training.py            # on an idle machine; about three minutes

Bare: Unsloth's policy in TRL's GRPOTrainer with TRL's completions log. Ours: the same model,
batch, lengths, rewards and seed in a session: metrics, health, checkpoints, dashboard. They
take turns of TURN steps, and what is compared is processor time, which other programs disturb
less than the clock. The share inside our own methods, which a busy machine disturbs least, is that
of a training of STEPS steps, as long as that of `make demo`.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import statistics
import tempfile
import time
from pathlib import Path

TURNS, TURN, STEPS, PROMPTS = 5, 10, 100, 64
SETTINGS = {"grpo.max_steps": TURN, "train.eval_steps": 0, "grpo.save_steps": 25, "seed": 0}


def bare(folder, stage, policy, rewards, rows) -> float:
    """Processor seconds a step of TRL alone."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback
    from trl import GRPOConfig, GRPOTrainer

    from grpo_nb.stages.arguments import grpo_arguments

    arguments = grpo_arguments(stage, policy, rewards) | {"output_dir": str(folder)}
    trainer = GRPOTrainer(
        model=policy.model,
        processing_class=policy.tokenizer,
        reward_funcs=rewards.reward_funcs,
        args=GRPOConfig(**arguments),
        train_dataset=Dataset.from_list(rows),
    )
    trainer.remove_callback(PrinterCallback)
    started = time.process_time()
    trainer.train()
    return (time.process_time() - started) / TURN


def ours(stage, policy, rewards, rows) -> float:
    """Processor seconds a step of our trainer, with a dashboard that watches."""
    from grpo_nb import stages, views

    trainer = stages.build_trainer(policy, rewards, rows, stage)
    trainer.monitor.watchers.append(views.TrainingDashboard())
    started = time.process_time()
    trainer.train()
    return (time.process_time() - started) / trainer.args.max_steps


def count_inside() -> list[float]:
    """Processor seconds that each call of our methods takes, from now on."""
    from grpo_nb import Monitor
    from grpo_nb.training import stock

    spent: list[float] = []

    def counted(method):
        def call(*args, **kwargs):
            started = time.process_time()
            result = method(*args, **kwargs)
            spent.append(time.process_time() - started)
            return result

        return call

    for owner, names in (
        (Monitor, ("on_log", "on_step_end", "on_pre_optimizer_step")),
        (stock, ("distinct", "of_a_step")),
    ):
        for name in names:
            setattr(owner, name, counted(getattr(owner, name)))
    return spent


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        from grpo_nb import data, models, rewards
        from grpo_nb.runs import Run, Stage
        from grpo_nb.runs.config import resolve
        from grpo_nb.stages.validation import Validation

        config, run = resolve("tiny-cpu", SETTINGS), Run("benchmark")
        data.prepare_run(run, config.data, config.seed, lambda chats: [30] * len(chats))
        rows, chosen = data.load(run, "train"), rewards.load_preset("math")
        stage = Stage(run, "03", config)
        pairs, spent = [], count_inside()
        for turn in range(TURNS + 1):
            policies = [models.load_policy(config) for _ in range(2)]
            pair = bare(Path(folder) / "bare", stage, policies[0], chosen, rows)
            pairs.append((pair, ours(stage, policies[1], chosen, rows)))
            print(f"turn {turn}: bare {pairs[-1][0]:.3f} s a step, ours {pairs[-1][1]:.3f} s")
        ratios = [b / a for a, b in pairs[1:]]  # the first turn warms up
        middle, spread = statistics.median(ratios), max(ratios) - min(ratios)
        print(f"ours / bare: {middle:.3f} (median of {TURNS}, spread {spread:.3f})")
        whole = resolve("tiny-cpu", SETTINGS | {"grpo.max_steps": STEPS})
        policy = models.load_policy(config)
        spent.clear()
        a_step = ours(Stage(run, "03", whole), policy, chosen, rows)
        share = sum(spent) / (a_step * STEPS)
        print(f"inside our methods: {share:.2%} of a training of {STEPS} steps")
        validate = Validation(policies[1], rows[:PROMPTS], chosen, config)
        seconds = [validate()["eval/seconds"] for _ in range(5)]
        print(f"validation of {PROMPTS} prompts: {statistics.median(seconds):.2f} s")


if __name__ == "__main__":
    main()
