"""Act between steps: record metrics, raise alerts, obey requests, save checkpoints."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import TrainerCallback

from grpo_nb.models import sharded
from grpo_nb.rewards.prompts import message_text, transcript
from grpo_nb.runs import atomic_path, write_json
from grpo_nb.runs.files import append_line, read_json
from grpo_nb.training import health, judges, ranks
from grpo_nb.training.checkpoints import adaptive_rewards, remove_old, seal, whole_or_aside
from grpo_nb.training.guard import Guard
from grpo_nb.training.updates import Update
from grpo_nb.training.validation import Validation

BAD_STEPS = 3  # skipped updates in a row after which training ends
REMEDY = (
    "Repair a reward that gives None or NaN, or what it calls (a server, a file); else lower "
    "train.learning_rate, or set model.quantization = '16bit'"
)


class StepCallback(TrainerCallback):
    """Do the work that our `Trainer` adds to TRL's before and after each step.

    Args:
        trainer: The trainer.
        validation: The validation, which runs every `train.eval_steps` steps if it has rows.
    """

    def __init__(self, trainer: Any, validation: Validation) -> None:
        self.trainer, self.validation = trainer, validation
        self.settings, self.folder = trainer.stage.config.train, trainer.folder
        self.watch = health.Watch(health.Expected({}))  # `Trainer.train` sets the run's own
        self.bad = 0  # updates that were skipped in a row
        self.saved = self.begun = 0  # step of the last checkpoint; step at which training began
        self.failure = ""  # why training ended without a request
        self.guard = Guard(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate before the first step, or restore rewards and row order from the checkpoint."""
        self.bad, self.failure = 0, ""
        if not state.global_step:
            if self.validation.rows:
                self._publish({"step": 0, **self._figures()}, [])
            return
        for reward in adaptive_rewards(self.trainer.rewards):
            reward.load(self.folder / f"checkpoint-{state.global_step}")
        # Each epoch draws a new order of the rows. Repeat the draws of all completed epochs.
        for _ in range(math.floor(state.epoch + 1e-6)):
            next(iter(self.trainer.row_sampler))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Test the samples (`guard`) before the first step and every `train.guard_steps` steps."""
        step, every = state.global_step, self.settings.guard_steps
        if every and (step == self.begun or step % every == 0):
            self.guard()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Test the samples once more, because a fault may have arisen since the last test."""
        if self.settings.guard_steps and state.global_step > self.begun and not self.failure:
            self.guard()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Skip an update whose gradient is not finite, or whose completions have no score.

        An infinite or NaN gradient would ruin every weight; without scores, nothing is learnt.
        After BAD_STEPS such updates in a row, training ends. Overflows that only lower the loss
        scale of fp16 do not count.
        """
        model, step = self.trainer.model, state.global_step + 1
        self.trainer.policy.model.updated_in = self.folder
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        infinite = ranks.anywhere(not all(gradient.isfinite().all() for gradient in gradients))
        unscored = self._unscored()
        if not infinite and not unscored:
            self.bad = 0
            return
        model.zero_grad(set_to_none=True)
        loss_failed = ranks.anywhere(self.trainer._loss_failed)
        scaler = self.trainer.accelerator.scaler
        if not (unscored or loss_failed) and scaler and scaler.get_scale() > 1:
            # torch's GradScaler begins at 65,536, and halves its scale after each such step.
            scale = f"{scaler.get_scale():g}"
            print(f"step {step}: fp16 overflows at a loss scale of {scale}; no update is made")
            return
        why = unscored or "the gradient is not finite (NaN or inf)"
        print(f"step {step}: {why}; no update is made")
        self.bad += 1
        if self.bad == BAD_STEPS:
            count = f"no update could be made in {BAD_STEPS} steps in a row, up to step {step}"
            self.failure = f"{why}, and {count}. {REMEDY}"

    def _unscored(self) -> str:
        """Return why this step's scores (infinite, or all None) are unusable; "" if usable."""
        scores = self._scores()
        if infinite := [name for name in scores if np.isinf(scores[name]).any()]:
            return f"{', '.join(infinite)} gave an infinite score"
        if scores.size and scores.isna().all(axis=None):
            return "no completion has a score, for every reward gave None"
        return ""

    def _scores(self) -> pd.DataFrame:
        """Return the scores that TRL has logged, [completions, rewards]; NaN stands for None."""
        logs = self.trainer._logs["rewards"]
        return pd.DataFrame({name: list(scores) for name, scores in logs.items()}, dtype=float)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save a checkpoint or stop, if either is due or requested."""
        step, buttons = state.global_step, self.trainer.buttons
        if not generation_is_used_up(args, step):
            return
        due = step - self.saved >= self.settings.save_steps or step == args.max_steps
        if ranks.anywhere(buttons.stop.is_set()) or self.failure:
            control.should_training_stop = True
        if due or control.should_training_stop or ranks.anywhere(buttons.save.is_set()):
            buttons.save.clear()
            control.should_save = step != self.saved

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the checkpoint that transformers has written, and remove old ones."""
        self.saved = state.global_step
        ranks.from_main(lambda: self._seal(self.folder / f"checkpoint-{self.saved}"))

    def _seal(self, checkpoint: Path) -> None:
        for reward in adaptive_rewards(self.trainer.rewards):
            reward.save(checkpoint)
        seal(checkpoint)
        remove_old(self.folder, self.settings.keep_checkpoints)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Publish the metrics of a step, and validate if this is due or requested."""
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        # Off policy (trl.num_iterations), a step may use the completions of an earlier step.
        completions = self._completions() if "reward" in logs else []
        watched = completions and ranks.is_main() and self.settings.placebo == "none"
        figures = judges.figures(self.trainer, step, completions) if watched else {}
        self._publish({"step": step, **logs, **figures}, completions)
        every, request = self.settings.eval_steps, self.trainer.buttons.evaluate
        due = every and (step % every == 0 or step == args.max_steps)
        if self.validation.rows and (due or ranks.anywhere(request.is_set())):
            request.clear()
            figures = self._figures()
            self._publish({"step": step, **figures}, [])
            # The figures go to the trackers; our own `on_log` ignores logs without a loss.
            names = {name.replace("/", "_"): value for name, value in figures.items()}
            self.trainer.callback_handler.on_log(args, state, control, names)
            self._keep(figures, step)
        self.on_step_end(args, state, control)  # a request may have come in meanwhile

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

    def _publish(self, line: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        """Write a line of metrics and its alerts to disk, and pass them to the watchers."""
        alerts = self.watch.feed(line)
        if self.trainer.stage.config.train.placebo != "none":  # a placebo is not meant to learn
            alerts = [alert for alert in alerts if "placebo" in health.ALERTS[alert.name]]
        if not ranks.is_main():
            return
        append_line(self.folder / "metrics.jsonl", line)
        for alert in alerts:
            append_line(self.folder / "health.jsonl", {"step": line["step"], **alert._asdict()})
            print(health.summary([alert]))
        for watcher in self.trainer.watchers:
            watcher(Update(line, self.trainer.args.max_steps, completions, alerts))

    def _completions(self) -> list[dict[str, Any]]:
        """Return the completions of this step with their scores, which TRL has not written yet."""
        logs, scores = self.trainer._logs, self._scores()
        table = scores.assign(
            question=[message_text(prompt[-1]) for prompt in logs["prompt"]],
            completion=list(map(transcript, logs["completion"])),
            advantage=list(logs["advantages"]),
            reward=scores.fillna(0) @ np.array(self.trainer.args.reward_weights),
        )
        if images := logs["images"]:
            table["images"] = list(images)
        return table.to_dict("records")


def generation_is_used_up(args: Any, step: int) -> bool:
    """Return whether the next step samples anew; if so, a checkpoint needs no completions."""
    every = args.steps_per_generation * args.num_iterations  # micro-batches
    return step * args.gradient_accumulation_steps % every == 0
