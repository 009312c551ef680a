"""One process of a training, which several may share, with a fault where the caller says.

    python -m torch.distributed.run --nproc_per_node 2 tests/rank.py RUN [FAULT PROCESS STEP]

FAULT: kill, raise or stop (SIGTERM) that process in the rewards of that step; generation, backward
or saving: kill it there. And "planted", or "planted stop": fp32 and no sampling, each completion
follows from its step and its place among all processes'. Kill -9 leaves no time to tidy up.
`tests/stages/test_ranks.py` prepares the run.
"""

import os
import random
import signal
import sys

import torch

from grpo_nb import ranks, stages
from grpo_nb.models import weights
from grpo_nb.pipeline import notebooks
from grpo_nb.runs import Run


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def fail(trainer, fault, process, step):
    if fault in ("generation", "backward", "saving"):
        kill_in(trainer, fault, step)
    calculate = trainer._calculate_rewards

    def calculate_or_fail(*args, **kwargs):
        if ranks.rank() == process and trainer.state.global_step + 1 == step:
            if fault == "raise":
                raise KeyError("no such column")
            signals = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
            os.kill(os.getpid(), signals.get(fault, 0))
        return calculate(*args, **kwargs)

    trainer._calculate_rewards = calculate_or_fail


def kill_in(trainer, phase, step):
    """Kill this process in that phase of that step."""

    def here(work, done=step - 1):
        return lambda *given, **named: (
            die() if trainer.state.global_step == done else work(*given, **named)
        )

    if phase == "generation":
        trainer._generate_single_turn = here(trainer._generate_single_turn)
    elif phase == "backward":
        weights = [weight for weight in trainer.model.parameters() if weight.requires_grad]
        weights[0].register_hook(here(lambda gradient: None))
    else:  # the weights are written, the optimizer is not
        torch.save = here(torch.save, done=step)


def plant(trainer):
    tokenizer = trainer.processing_class

    def one(place):
        draw = random.Random(f"{trainer.state.global_step} {place}")
        text = f"{draw.randint(1, 99)} <answer>{draw.randint(1, 99)}"
        text = "<reasoning>" * draw.randint(0, 1) + text + "</answer>" * draw.randint(0, 1)
        return tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]

    def completions(prompt_ids, *args, **kwargs):
        first = ranks.rank() * len(prompt_ids)
        return [one(first + place) for place in range(len(prompt_ids))], None

    trainer._generate_single_turn = completions


def main(name, fault="", process="0", step="0"):
    attach, planted = stages.attach, fault.startswith("planted")
    fault = fault.removeprefix("planted").strip()

    def attach_and_plant(trainer, *args):
        attach(trainer, *args)
        if planted:
            plant(trainer)
        if fault:
            fail(trainer, fault, int(process), int(step))

    stages.attach = attach_and_plant
    if planted:
        weights.weights_dtype = lambda: torch.float32  # bf16 would round each pass' size its way
    notebooks.train(Run(name), [], force=True)  # its rewards were not tested


if __name__ == "__main__":
    main(*sys.argv[1:])
