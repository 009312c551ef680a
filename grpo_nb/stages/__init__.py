"""Do the work of a run's four stages in its run directory; notebooks 1 to 4 call this package.

    trainer = GRPOTrainer(…)  # TRL's or Unsloth's
    stages.attach(trainer, stage, rewards, validation_rows)
    trainer.train()

`rewards_cell` takes a run's own rewards from a notebook's cell, and does stages 01 and 02 in one
call each. `warm_start` does the SFT warm-up before GRPO. `arguments` builds the GRPOConfig of a
run. `trainer` extends TRL's trainer, and can be read from top to bottom. `checkpoints` decides from
which checkpoint a run resumes, and `validation` measures whether the policy improves. Everything
that needs no run is in other subpackages, such as `training` and `reward_lab`.
"""

from grpo_nb.lazy import exports

__getattr__ = exports(
    __name__,
    {
        "grpo_nb.stages.arguments": "effective grpo_arguments refuse_arguments",
        "grpo_nb.stages.checkpoints": "read_completions",
        "grpo_nb.stages.rewards_cell": "adopt in_template prepare_data rewards_cell test_rewards",
        "grpo_nb.stages.trainer": """RunTrainer attach build_trainer datasets
            environment_factory""",  # after Unsloth, which must precede transformers
        "grpo_nb.stages.warm_start": "warm_up warm_up_base",
    },
)
