"""Train a run in a process of its own, and be killed where the caller says.

    python tests/interrupted.py RUN [generation|backward|saving|moved STEP]

`tests/test_resume.py` prepares the run. Kill -9 leaves no time to tidy up.
"""

import os
import signal
import sys

from grpo_nb import data, models, rewards, training
from grpo_nb.runs import Run, Stage
from grpo_nb.training import checkpoints


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def plant(trainer, where, step):
    """Kill this process in that phase of that step."""
    import torch

    if where == "generation":
        generate = trainer._generate_single_turn
        trainer._generate_single_turn = lambda *args, **kwargs: (
            die() if trainer.state.global_step + 1 == step else generate(*args, **kwargs)
        )
    elif where == "backward":
        weights = [p for p in trainer.model.parameters() if p.requires_grad]
        weights[0].register_hook(lambda _: die() if trainer.state.global_step + 1 == step else None)
    elif where == "saving":  # the weights are written, the optimizer is not
        save = torch.save
        torch.save = lambda *args, **kwargs: (
            die() if trainer.state.global_step == step else save(*args, **kwargs)
        )
    elif where == "moved":  # an earlier training is put aside, and this one has not begun
        checkpoints.write_json = die


def main(name, where="", step="0"):
    run = Run(name)
    run.lock()
    stage = Stage(run, "03", run.config(), {})
    policy = models.load_policy(stage.config.model, stage.config.seed)
    form = rewards.Adaptive(rewards.soft_xml_format_reward, change=1.5)
    chosen = rewards.reward_set([(rewards.numeric_correctness_reward, 1.0), (form, 0.25)])
    args = training.grpo_config(stage, policy, chosen)
    trainer = training.Trainer(policy, chosen, args, data.load(run, "train"), stage)
    print(trainer.note)
    plant(trainer, where, int(step))
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
