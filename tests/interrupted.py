"""Train runs, each in a process of its own, which is killed where the caller says.

    echo '["FOLDER", "RUN", "generation", "4"]' | python tests/interrupted.py

A line of standard input is GRPO_NB_RUNS, a run and its fault (generation, backward, saving or
moved, and the step), or the run alone; the line that answers has returncode, stdout and stderr.
Each process is a fork of this one, which has imported what takes seconds and has no threads.
`tests/test_resume.py` prepares the runs. Kill -9 leaves no time to tidy up.
"""

import json
import os
import signal
import sys
import tempfile
import traceback

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


def main(folder, name, where="", step="0"):
    os.environ["GRPO_NB_RUNS"] = folder
    run = Run(name)
    run.lock()
    stage = Stage(run, "03", run.config())
    policy = models.load_policy(stage.config.model, stage.config.seed)
    form = rewards.Adaptive(rewards.soft_format_reward, change=1.5)
    chosen = rewards.reward_set([(rewards.numeric_correctness_reward, 1.0), (form, 0.25)])
    args = training.grpo_config(stage, policy, chosen)
    trainer = training.Trainer(policy, chosen, args, data.load(run, "train"), stage)
    print(trainer.plan)
    plant(trainer, where, int(step))
    trainer.train()


def fork(arguments):
    """How `main` ended in a process of its own."""
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as failed:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(failed.fileno(), 2)
            try:
                main(*arguments)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            sys.stdout.flush()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0), failed.seek(0)
        return {"returncode": code, "stdout": said.read(), "stderr": failed.read()}


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what Unsloth says as it is imported is no answer
    models.policy.import_unsloth()
    import trl  # noqa: F401

    for line in sys.stdin:
        answers.write(json.dumps(fork(json.loads(line))) + "\n")
