"""Stage 03 without its notebook, for launchers: one process, or one a GPU.

    python -m torch.distributed.run --nproc_per_node 8 -m grpo_nb train runs/NAME --processes 8
    accelerate launch --config_file docs/launch/fsdp.yaml -m grpo_nb train runs/NAME

Run file, lock, manifest, metrics, health and resumption are the notebook's. The first process
writes and speaks, the others are silent. See docs/launch.md.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from grpo_nb import data, models, reward_lab, rewards, training
from grpo_nb.pipeline.notebooks import QUIET, kept_settings
from grpo_nb.runs import Run, Stage, checks, config, start_stage, write_json
from grpo_nb.runs.config import RunConfig
from grpo_nb.training import ranks

FAILURE = "failure.json"
OUTPUTS = ("train/adapter", "train/metrics.jsonl", "train/health.jsonl")


class Failed(RuntimeError):
    """Of several processes: this one has nothing to add to what was said."""


def train(
    run: Run, settings: Mapping[str, Any], processes: int | None = None, force: bool = False
) -> None:
    """Train a run whose rewards were tested.

    Args:
        run: Stages 01 and 02 are done.
        settings: Dotted names of stage 03 to values, over those of the run.
        processes: How many share each step; None: as many as the launcher started.
        force: Start although an earlier stage has changed, or a check fails.

    Raises:
        ValueError: Before anything starts: another number of processes, a wrong setting, a
            stage missing, or a policy that several processes cannot train.
        RuntimeError: The run is in use, a check failed, or what ended the training.
        Failed: Another process said what it was.
        KeyboardInterrupt: Stopped by a signal; a checkpoint is kept.
    """
    os.environ.update(QUIET)
    ranks.start(processes)
    if not ranks.is_main():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - until the process ends
    ranks.from_main(lambda: (run / FAILURE).unlink(missing_ok=True))
    try:
        _train(run, settings, force)
        ranks.end()
    except BaseException as error:
        if ranks.count() == 1:
            raise
        _end_all(run, error)


def _end_all(run: Run, error: BaseException) -> None:
    """Raise the error where it is the first; its process' end is the end of the others."""
    about = {"process": ranks.rank(), "error": f"{type(error).__name__}: {error}"}
    try:
        with (run / FAILURE).open("x", encoding="utf-8") as file:
            json.dump(about | {"traceback": traceback.format_exception(error)}, file, indent=2)
    except FileExistsError:
        raise Failed("") from None
    if ranks.is_lost_connection(error):
        kept = " ".join(getattr(error, "__notes__", []))
        raise RuntimeError(f"another process of this training has ended. {kept}") from error
    raise error


def _train(run: Run, settings: Mapping[str, Any], force: bool) -> None:
    stage = ranks.from_main(lambda: _start(run, settings, force))
    _refuse(stage.config)
    chosen = rewards.load_rewards(stage.config.rewards)
    print(reward_lab.check(run, chosen, force))
    policy = models.load_policy(stage.config.model, stage.config.seed, stage.config.policy)
    if stage.config.train.sft_steps:
        print(training.warm_up(policy, stage))
    args = training.grpo_config(stage, policy, chosen)
    trainer = training.Trainer(policy, chosen, args, data.load(run, "train"), stage)
    print(trainer.plan)
    print(_shares(args))
    found = trainer.preflight()
    print(checks.table(found).to_string(index=False))
    checks.refuse(found, force)
    trainer.watch(lambda update: print(_line(update), flush=True))
    if ranks.count() > 1:
        # When one process ends the launcher terminates the others, which have to say what is kept.
        # While the steps last `train` obeys the signal; what comes after them is short.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    trainer.train()
    print(ranks.from_main(lambda: stage.finish(*OUTPUTS)))


def _start(run: Run, settings: Mapping[str, Any], force: bool) -> Stage:
    """With what earlier calls have set for stage 03, and what is given."""
    kept = config.of_stage("03", kept_settings(run, "03"))
    stage = start_stage("03", run.name, kept | settings, force=force)
    typed = {name: config.flatten(stage.config)[name] for name in settings}
    write_json(run / "settings.json", run.settings() | typed)
    return stage


def _refuse(settings: RunConfig) -> None:
    """Raise ValueError where several processes cannot train this."""
    if ranks.count() > 1 and settings.policy.backend == "unsloth":
        raise ValueError(
            f"with Unsloth we train in one process, and there are {ranks.count()}: "
            "--set policy.backend=transformers"
        )
    if not models.sharded():
        return
    needed = {
        "model.quantization = '16bit'": settings.model.quantization == "16bit",
        "train.sft_steps = 0": not settings.train.sft_steps,
    }
    if missing := [need for need, met in needed.items() if not met]:
        raise ValueError(f"FSDP and ZeRO-3 need {' and '.join(missing)}; or take ddp.yaml")


def _shares(args: Any) -> str:
    """How the processes share a step, by a GRPOConfig."""
    rows, passes = args.per_device_train_batch_size, args.gradient_accumulation_steps
    step = rows * passes * ranks.count()
    return (
        f"a step: {step // args.num_generations} prompts x {args.num_generations} = {step} "
        f"completions, on {ranks.count()} process(es) in {passes} micro-batch(es) of {rows}"
    )


def _line(update: training.Update) -> str:
    known = update.line
    shown = ("reward", "completions/mean_length", "seconds/generation", "step_time")
    shown = (*shown, "eval/accuracy", "eval/reward")
    figures = [f"{name} {known[name]:.3g}" for name in shown if known.get(name) is not None]
    return f"step {known['step']}/{update.total_steps}: {', '.join(figures)}"
