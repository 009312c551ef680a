"""Run stage 03: GRPO with TRL's trainer, checks before training, and readable metrics.

    trainer = GRPOTrainer(…)  # TRL's or Unsloth's
    training.attach(trainer, stage, rewards, validation_rows)
    trainer.train()

`trainer` can be read from top to bottom. `arguments` builds the GRPOConfig of a run, `callbacks`
acts between steps, `checkpoints` resumes a run, `health` raises alerts from its metrics,
`preflight` runs the largest step once, `validation` measures whether the policy improves, and
`guard` tests whether the samples come from the policy. `fast_cpu` speeds up training on a CPU, and
`ranks` distributes training over processes.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.files": "append_line read_lines",
        "grpo_nb.updates": "Buttons Update Watcher",
        "grpo_nb.training.arguments": "effective grpo_arguments notable refuse_unknown_trl",
        "grpo_nb.training.metrics": "read_completions",
        "grpo_nb.training.rescue": "Rescue rescue_base",
        "grpo_nb.training.trainer": """RunTrainer attach build_trainer datasets
            environment_factory""",  # after Unsloth, which must precede transformers
        "grpo_nb.training.warm_up_run": "warm_up warm_up_base warm_up_curve",
    },
)
