"""Act between steps of a run: save checkpoints from which it goes on exactly, and show progress."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from grpo_nb import ranks
from grpo_nb.stages.checkpoints import adaptive_rewards, remove_old, seal
from grpo_nb.training import stock
from grpo_nb.updates import Update, Watcher

if TYPE_CHECKING:
    from grpo_nb.runs import Stage


class StepCallback(TrainerCallback):
    """Do the work that a run's trainer adds to TRL's and to the monitor's after each step.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.settings, self.folder = trainer.stage.config.grpo, trainer.folder
        self.saved = 0  # step of the last checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore rewards and row order from the checkpoint."""
        if not state.global_step:
            return
        for reward in adaptive_rewards(self.trainer.rewards):
            reward.load(self.folder / f"checkpoint-{state.global_step}")
        # Each epoch draws a new order of the rows. Repeat the draws of all completed epochs.
        for _ in range(math.floor(state.epoch + 1e-6)):
            next(iter(self.trainer.row_sampler))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that the policy is no longer the one that was loaded."""
        self.trainer.policy.model.updated_in = self.folder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save a checkpoint if that is due or requested, or if training stops."""
        step = state.global_step
        if not stock.generation_is_used_up(args, step):
            return
        due = step - self.saved >= self.settings.save_steps or step == args.max_steps
        if due or control.should_training_stop or control.should_save:
            control.should_save = step != self.saved

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the checkpoint that transformers has written, and remove old ones."""
        self.saved = state.global_step
        ranks.from_main(lambda: self._seal(self.folder / f"checkpoint-{self.saved}"))

    def _seal(self, checkpoint: Path) -> None:
        for reward in adaptive_rewards(self.trainer.rewards):
            reward.save(checkpoint)
        seal(checkpoint)
        remove_old(self.folder, self.settings.save_total_limit)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Save if that was requested while the step was logged or validated."""
        if logs and "loss" in logs:
            self.on_step_end(args, state, control)


def progress_of(stage: "Stage") -> Watcher:
    """Return a watcher that shows how far along the training is."""

    def show(update: Update) -> None:
        line, note = update.line, ""
        if "eval/accuracy" in line:
            note = f"validated: accuracy {line['eval/accuracy']:.1%}"
        elif line.get("reward") is not None:
            note = f"reward {line['reward']:.2f}"
        stage.progress(line["step"], update.total_steps, note)

    return show
