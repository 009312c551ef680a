"""Stage 03: TRL's GRPOTrainer over the policy, its metrics kept, its progress shown."""

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from grpo_nb import health
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.runs import Stage
from grpo_nb.training.arguments import grpo_arguments
from grpo_nb.training.control import Controls, Update, Watcher
from grpo_nb.training.metrics import append_line, read_completions, read_lines
from grpo_nb.training.trainer import adapter_norm, build_trainer, save_adapter

if TYPE_CHECKING:
    from trl import GRPOTrainer

__all__ = [
    "Controls",
    "Update",
    "Watcher",
    "adapter_norm",
    "append_line",
    "build_trainer",
    "expected",
    "grpo_arguments",
    "read_completions",
    "read_lines",
    "save_adapter",
    "train",
]


def train(trainer: "GRPOTrainer", stage: Stage, preset: RewardSet) -> list[dict[str, float]]:
    """Train to the last step; metrics and alerts are on disk after each one.

    Alerts on the training's health are printed as they come, and kept in train/health.jsonl.

    Returns:
        One dict of TRL's metrics a step, with its "step".
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    class Keep(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "reward" in logs:
                line = {"step": state.global_step, **logs}
                append_line(path, line)
                for alert in watch.feed(line):
                    append_line(alerts, alert._asdict())
                    print(health.summary([alert]))
                show(state.global_step, state.max_steps, f"reward {logs['reward']:.2f}")

    path, alerts = stage.run / "train/metrics.jsonl", stage.run / "train/health.jsonl"
    alerts.write_text("")
    watch = health.Watch(expected(preset, stage), stage.config.health)
    show = _watchers(stage)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Keep())
    show(0, trainer.args.max_steps, "")
    trainer.train()
    return read_lines(path)


def expected(preset: RewardSet, stage: Stage) -> health.Expected:
    """What the run knows before step 1, by which its health is judged."""
    report = stage.run / "rewards/report.json"
    pilot = json.loads(report.read_text(encoding="utf-8"))["pilot"] if report.exists() else {}
    ranges = {
        func.__name__: (weight, *declared_range(getattr(func, "reward", func)))
        for func, weight in zip(preset.reward_funcs, preset.reward_weights, strict=True)
    }
    seconds = pilot.get("predicted seconds per step", math.inf)
    return health.Expected(ranges, stage.config.step_completions, step_seconds=seconds)


def _watchers(stage: Stage) -> Callable[[int, int, str], None]:
    """Shows progress below the cell (as text that updates) and to the pipeline."""
    from IPython import get_ipython
    from IPython.display import display

    handle = None

    def show(done: int, total: int, note: str) -> None:
        nonlocal handle
        stage.progress(done, total, note)
        if get_ipython() is None:
            return
        filled = round(30 * done / total)
        line = {"text/plain": f"{'█' * filled}{'░' * (30 - filled)} step {done}/{total}  {note}"}
        if handle is None:
            handle = display(line, raw=True, display_id=True)
        else:
            handle.update(line, raw=True)

    return show
