"""What happens between steps: metrics kept, health judged, requests obeyed, checkpoints due."""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TrainerCallback

from grpo_nb.models import sharded
from grpo_nb.training import health, ranks
from grpo_nb.training.checkpoints import adaptive_rewards, seal
from grpo_nb.training.metrics import append_line
from grpo_nb.training.preflight import scale_can_fall
from grpo_nb.training.updates import Update
from grpo_nb.training.validation import Validation, is_best, keep_best

BAD_STEPS = 3  # updates in a row that had to be left out end the training
GRADIENT = (
    "Lower train.learning_rate, look for a reward that is NaN, or set model.quantization = '16bit'"
)
SCORES = "Repair the reward, or what it asks (a server, a file), and test it in notebook 2"


class StepCallback(TrainerCallback):
    """What `Trainer` does after each step, beside TRL's own.

    Args:
        trainer: Whose steps these are.
        validation: Every `train.eval_steps`; None for never.
    """

    def __init__(self, trainer: Any, validation: Validation | None) -> None:
        self.trainer, self.validation = trainer, validation
        self.settings, self.folder = trainer.stage.config.train, trainer.folder
        self.watch = health.Watch(health.Expected({}))  # one that saw earlier steps, in `train`
        self.bad, self.saved = 0, -1
        self.random_state: Any = None
        self.failure = ""  # why the training ended itself

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.random_state, self.bad, self.failure = random_state(), 0, ""
        if not state.global_step:
            self.saved = -1
            if self.validation:  # what the policy begins with
                self._keep({"step": 0, **self._figures()}, [])
            return
        self.saved = state.global_step
        checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        for reward in adaptive_rewards(self.trainer.reward_funcs):
            reward.load(checkpoint)
        # Each epoch draws a new order of the rows, which a fresh sampler has not drawn yet.
        for _ in range(math.floor(state.epoch + 1e-6)):
            next(iter(self.trainer.row_sampler))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update that is not a number would ruin every weight, one without scores says nothing.

        Both are left out; BAD_STEPS of them in a row end the training.
        """
        gradients = [p.grad for p in self.trainer.model.parameters() if p.grad is not None]
        finite = not ranks.anywhere(not all(gradient.isfinite().all() for gradient in gradients))
        unscored = self._unscored()
        if finite and not unscored:
            self.bad = 0
            return
        self.trainer.model.zero_grad(set_to_none=True)
        seen = unscored or "the gradient is not a number"
        if not unscored and self._overflows():
            scale = self.trainer.accelerator.scaler.get_scale()
            print(
                f"step {state.global_step + 1}: fp16 overflows at a loss scale of {scale:g}, "
                "which is halved now; no update is made"
            )
            return
        self.bad += 1
        print(f"step {state.global_step + 1}: {seen}; no update is made")
        if self.bad == BAD_STEPS:
            self.failure = (
                f"{seen}, and no update could be made in {BAD_STEPS} steps in a row, up to step "
                f"{state.global_step + 1}. " + (SCORES if unscored else GRADIENT)
            )

    def _unscored(self) -> str:
        """Why the completions of this step teach nothing; "" where they do."""
        scores = {
            name: np.array(list(s), float) for name, s in self.trainer._logs["rewards"].items()
        }
        if infinite := [name for name, of_reward in scores.items() if np.isinf(of_reward).any()]:
            return f"{', '.join(infinite)} gave an infinite score"
        if scores and all(np.isnan(of_reward).all() for of_reward in scores.values()):
            return "no completion has a score, for every reward gave None"
        return ""

    def _overflows(self) -> bool:
        """Whether fp16's loss scale, and not the loss, made the gradient infinite."""
        failed = ranks.anywhere(self.trainer._loss_failed)
        return scale_can_fall(self.trainer) and not failed

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.random_state = random_state()
        self._obey(args, state, control)

    def _obey(self, args: Any, state: Any, control: Any) -> None:
        """Save and stop where that is due or asked for."""
        step, controls = state.global_step, self.trainer.controls
        if not generation_is_used_up(args, step):
            return
        due = step - max(self.saved, 0) >= self.settings.save_steps or step == args.max_steps
        if ranks.anywhere(controls.stop.is_set()) or self.failure:
            control.should_training_stop = True
        if due or control.should_training_stop or ranks.anywhere(controls.save.is_set()):
            controls.save.clear()
            control.should_save = step != self.saved

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved = state.global_step
        ranks.from_main(lambda: self._seal(Path(args.output_dir) / f"checkpoint-{self.saved}"))

    def _seal(self, checkpoint: Path) -> None:
        for reward in adaptive_rewards(self.trainer.reward_funcs):
            reward.save(checkpoint)
        seal(checkpoint, self.settings.keep_checkpoints)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        step = state.global_step
        # Off policy (trl.num_iterations) a step may use completions of one before.
        sampled = self._completions() if "reward" in logs else []
        self._keep({"step": step, **logs}, sampled)
        every, evaluate = self.settings.eval_steps, self.trainer.controls.evaluate
        due = every and (step % every == 0 or step == args.max_steps)
        if self.validation and (due or ranks.anywhere(evaluate.is_set())):
            evaluate.clear()
            figures = self._validate(step, control)
            # To the trackers; we take no notice of a log without a loss.
            told = {name.replace("/", "_"): value for name, value in figures.items()}
            self.trainer.callback_handler.on_log(args, state, control, told)
        self._obey(args, state, control)  # what was asked for meanwhile

    def _validate(self, step: int, control: Any) -> dict[str, float]:
        figures = self._figures()
        self._keep({"step": step, **figures}, [])
        if not all(map(math.isfinite, figures.values())):  # the rewards gave None, or infinity
            print(f"step {step}: this validation has no score, and does not count")
            return figures
        best = self.folder / "best"
        self.trainer.gather_weights()
        if ranks.is_main() and is_best(best, figures):
            keep_best(best, self.trainer.save_adapter, step, figures)
        accuracies = [accuracy for _, accuracy in self.watch.evals]  # those before a resumption too
        since_best = accuracies[::-1].index(max(accuracies))
        patience = self.settings.early_stop_evals
        if patience and since_best >= patience:
            print(f"step {step}: no better in {patience} validations; the training ends here")
            control.should_training_stop = True
            control.should_save = generation_is_used_up(self.trainer.args, step)
        return figures

    def _figures(self) -> dict[str, float]:
        """The validation's, by the first process; sharded weights take all of them in step."""
        if not sharded():
            return ranks.from_main(self.validation)
        with self.trainer.whole_weights():
            figures = self.validation()
        return ranks.from_main(lambda: figures)

    def _keep(self, line: dict[str, Any], completions: list[dict[str, Any]]) -> None:
        alerts = self.watch.feed(line)
        if not ranks.is_main():
            return
        append_line(self.folder / "metrics.jsonl", line)
        for alert in alerts:
            append_line(self.folder / "health.jsonl", {"step": line["step"], **alert._asdict()})
            print(health.summary([alert]))
        for watcher in self.trainer.watchers:
            watcher(Update(line, self.trainer.args.max_steps, completions, alerts))

    def _completions(self) -> list[dict[str, Any]]:
        """Those of this step, with their scores, as TRL holds them until it writes them."""
        logs = self.trainer._logs
        columns: Mapping[str, Any] = {
            "question": [prompt[-1]["content"] for prompt in logs["prompt"]],
            "completion": [completion[-1]["content"] for completion in logs["completion"]],
            **logs["rewards"],
            "advantage": logs["advantages"],
        }
        weights = dict(zip(logs["rewards"], self.trainer.args.reward_weights, strict=True))
        lines = [dict(zip(columns, v, strict=True)) for v in zip(*columns.values(), strict=True)]
        for line in lines:
            scores = {name: line[name] for name in weights if not math.isnan(line[name])}
            line["reward"] = sum(weights[name] * score for name, score in scores.items())
        return lines


def generation_is_used_up(args: Any, step: int) -> bool:
    """Whether the step after this one samples: a checkpoint holds no completions."""
    every = args.steps_per_generation * args.num_iterations  # micro-batches
    return step * args.gradient_accumulation_steps % every == 0


def random_state() -> tuple[Any, ...]:
    """Of all generators that sampling, rewards and dropout may use."""
    import torch

    gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def restore_random_state(state: tuple[Any, ...]) -> None:
    import torch

    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])
