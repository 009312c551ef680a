"""Run stage 03 without its notebook, under a launcher: in one process, or in one per GPU.

    python -m torch.distributed.run --nproc_per_node 8 -m grpo_nb train runs/NAME --processes 8
    accelerate launch --config_file docs/launch/fsdp.yaml -m grpo_nb train runs/NAME

Run file, lock, manifest, metrics, health and resumption are the same as in the notebook. Only the
first process writes files and prints. See docs/launch.md.
"""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_nb import models, training
from grpo_nb.pipeline import stages
from grpo_nb.pipeline.notebooks import QUIET, assigned, kept_settings
from grpo_nb.runs import Run, Stage, config, start_stage
from grpo_nb.runs.config import RunConfig
from grpo_nb.training import ranks

# A process that lost the connection to another one waits this long before it records its error.
# The launcher names the earliest error as the cause. It polls every 0.1 s, and rounds to seconds.
SECONDS_TO_BE_ENDED = 3


def train(
    run: Run, assignments: Sequence[str], processes: int | None = None, force: bool = False
) -> None:
    """Train a run whose rewards were tested.

    Args:
        run: A run whose stages 01 and 02 are done.
        assignments: Settings of stage 03 as `--set` takes them; they override the run's.
        processes: How many processes share each step; None for all that the launcher started.
        force: Whether to start even if an earlier stage has changed, or a check fails.

    Raises:
        ValueError: Before the first step: the number of processes or a setting is wrong, a stage is
            missing, the policy cannot be trained by several processes, or a check failed.
        RuntimeError: The run is in use, or training failed, here or in another process, whose error
            the launcher prints.
        KeyboardInterrupt: A signal stopped training; a checkpoint is kept.
    """
    os.environ.update(QUIET | {"GRPO_NB_RUNS": str(run.path.parent)})
    ranks.start(processes)
    if not ranks.is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process ends
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # the launcher prints the first error from it
            sys.stderr = sys.stdout
    ranks.recorded(_train)(run, assigned(assignments), force)
    ranks.end()


def _train(run: Run, settings: Mapping[str, Any], force: bool) -> None:
    try:
        stage = ranks.from_main(lambda: _start(run, settings, force))
        _refuse(stage.config)
        print(stages.train_grpo(stage, _begin, force))
    except RuntimeError as error:
        if ranks.count() == 1 or not ranks.is_lost_connection(error):
            raise
        time.sleep(SECONDS_TO_BE_ENDED)
        notes = " ".join(getattr(error, "__notes__", []))
        raise RuntimeError(f"another process of this run died; see its error. {notes}") from error


def _begin(trainer: Any) -> None:
    """Print how the processes share a step, then a line per step.

    With several processes, also ignore SIGTERM except while `Trainer.train` handles it.
    """
    print(_shares(trainer.args))
    trainer.watch(lambda update: print(_line(update), flush=True))
    if ranks.count() > 1:
        # When one process ends, the launcher sends SIGTERM to the others, which must still report
        # what is kept. During the steps `train` handles the signal; the other work is short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _start(run: Run, settings: Mapping[str, Any], force: bool) -> Stage:
    """Start stage 03 with these settings, which override those of earlier calls."""
    earlier = config.of_stage("03", kept_settings(run, "03"))
    return start_stage("03", run.path, earlier | settings, force=force)


def _refuse(settings: RunConfig) -> None:
    """Raise ValueError if several processes cannot train with these settings."""
    if ranks.count() > 1 and settings.policy.backend == "unsloth":
        raise ValueError(
            f"Unsloth trains in one process, and there are {ranks.count()}: start one, or use "
            "--set policy.backend=transformers"
        )
    packed, steps = settings.model.load_in_4bit, settings.train.sft_steps
    if models.sharded() and (packed or steps):
        raise ValueError(
            "FSDP and ZeRO-3 need model.load_in_4bit = False and train.sft_steps = 0, and these "
            f"are {packed} and {steps}: set them, or use ddp.yaml"
        )


def _shares(args: Any) -> str:
    """Describe how the processes share a step of this GRPOConfig."""
    rows, micro_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
    step = rows * micro_batches * ranks.count()
    return (
        f"a step: {step // args.num_generations} prompts x {args.num_generations} = {step} "
        f"completions, on {ranks.count()} process(es) in {micro_batches} micro-batch(es) of {rows}"
    )


def _line(update: training.Update) -> str:
    line = update.line
    names = ("reward", "completions/mean_length", "seconds/generation", "step_time")
    names = (*names, "eval/accuracy", "eval/reward")
    figures = [f"{name} {line[name]:.3g}" for name in names if line.get(name) is not None]
    return f"step {line['step']}/{update.total_steps}: {', '.join(figures)}"
