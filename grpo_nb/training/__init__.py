# ruff: noqa: F401 (the imports below are the package's public names)
"""Run stage 03: GRPO with TRL's trainer, checks before training, and readable metrics.

    args = training.grpo_config(stage, policy, rewards)  # a trl.GRPOConfig
    trainer = training.Trainer(policy, rewards, args, rows, stage)  # a trl.GRPOTrainer
    trainer.train()

`trainer` can be read from top to bottom. `arguments` builds the GRPOConfig of a run, `callbacks`
acts between steps, `checkpoints` resumes a run, `health` raises alerts from its metrics,
`preflight` runs the largest step once, `validation` measures whether the policy improves, and
`guard` tests whether the samples come from the policy. `fast_cpu` speeds up training on a CPU, and
`ranks` distributes training over processes.
"""

from typing import Any

from grpo_nb.files import append_line, read_lines
from grpo_nb.training.arguments import effective, grpo_config, notable, refuse_unknown_trl
from grpo_nb.training.metrics import read_completions
from grpo_nb.training.rescue import Rescue, rescue_base
from grpo_nb.training.warm_up import warm_up, warm_up_base, warm_up_curve
from grpo_nb.updates import Buttons, Update, Watcher


def __getattr__(name: str) -> Any:
    """Import `Trainer` only when it is first used, because Unsloth must be imported before TRL."""
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from grpo_nb.training.trainer import Trainer

    return Trainer
