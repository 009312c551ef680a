"""Act between steps of a run: validate, and save checkpoints from which it goes on exactly."""

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from grpo_nb.files import atomic_path, read_json, write_json
from grpo_nb.models import sharded
from grpo_nb.training import ranks, stock
from grpo_nb.training.checkpoints import adaptive_rewards, remove_old, seal, whole_or_aside
from grpo_nb.training.validation import Validation


class StepCallback(TrainerCallback):
    """Do the work that our `Trainer` adds to TRL's and to the monitor's after each step.

    Args:
        trainer: The trainer.
        validation: The validation, which runs every `train.eval_steps` steps if it has rows.
    """

    def __init__(self, trainer: Any, validation: Validation) -> None:
        self.trainer, self.validation = trainer, validation
        self.settings, self.folder = trainer.stage.config, trainer.folder
        self.saved = 0  # step of the last checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate before the first step, or restore rewards and row order from the checkpoint."""
        if not state.global_step:
            if self.validation.rows:
                self._validate(args, state, control)
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
        due = step - self.saved >= self.settings.grpo.save_steps or step == args.max_steps
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
        remove_old(self.folder, self.settings.grpo.save_total_limit)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Validate if this is due or requested."""
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        every, request = self.settings.train.eval_steps, self.trainer.buttons.evaluate
        due = every and (step % every == 0 or step == args.max_steps)
        if self.validation.rows and (due or ranks.anywhere(request.is_set())):
            request.clear()
            self._keep(self._validate(args, state, control), step)
        self.on_step_end(args, state, control)  # a request may have come in meanwhile

    def _validate(self, args: Any, state: Any, control: Any) -> dict[str, float]:
        """Validate, and pass the figures to the monitor and to the trackers, and return them."""
        figures = self._figures()
        names = {name.replace("/", "_"): value for name, value in figures.items()}
        self.trainer.callback_handler.on_log(args, state, control, names)
        return figures

    def _keep(self, figures: dict[str, float], step: int) -> None:
        """Keep the adapter with the best validation, and its figures; in a tie, the later one."""
        if not all(map(math.isfinite, figures.values())):  # a reward gave None or infinity
            print(f"step {step}: this validation has no score, and does not count")
            return
        self.trainer.gather_weights()
        ranks.from_main(lambda: self._keep_better(figures, step))

    def _keep_better(self, figures: dict[str, float], step: int) -> None:
        best = self.folder / "best"
        before = read_json(best / "eval.json") if whole_or_aside(best) else {"eval/accuracy": 0}
        if before["eval/accuracy"] <= figures["eval/accuracy"]:
            with atomic_path(best) as temporary:
                self.trainer.save_adapter(temporary)
                write_json(temporary / "eval.json", {"step": step, **figures})
                seal(temporary)

    def _figures(self) -> dict[str, float]:
        """Validate on the first process, or on all together if the weights are sharded."""
        if not sharded():
            return ranks.from_main(self.validation)
        with self.trainer.whole_weights():
            figures = self.validation()
        return ranks.from_main(lambda: figures)
