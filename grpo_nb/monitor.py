"""Watch a training that somebody else built: `Monitor(trainer)` beside any `trl.GRPOTrainer`.

    trainer = GRPOTrainer(…)
    Monitor(trainer)
    trainer.train()

It raises the alerts of `training.health`, writes a line for each step to OUTPUT_DIR/monitor/, and
skips updates that would ruin the weights. It reads what TRL logs and needs nothing of ours.
"""

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from transformers import TrainerCallback

from grpo_nb.checks import Check
from grpo_nb.rewards.prompts import completion_text
from grpo_nb.training.health import Expected, Watch, summary
from grpo_nb.training.logs import of_arguments, of_trainer, renamed
from grpo_nb.training.updates import Buttons, Update

BAD_STEPS = 3  # updates that are skipped in a row before training ends
SHOWN = (
    ("reward", ".3g"),
    ("reward_std", ".2g"),
    ("completions/mean_length", ".0f"),
    ("kl", ".2g"),
)


def _aside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Let a monitor that fails say so once and stand aside: the training goes on."""

    @functools.wraps(method)
    def guarded(self: "Monitor", args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.failure:
            return None
        try:
            return method(self, args, state, control, **kwargs)
        except Exception as error:  # whatever it is, it is no reason to end a training
            self.failure = f"{type(error).__name__}: {error}"
            print(f"the monitor stands aside from step {state.global_step} on: {self.failure}")
            return None

    return guarded


class Monitor(TrainerCallback):
    """Raise alerts beside a trainer, show its progress, and skip updates that ruin the weights.

    An update is skipped if its gradient is NaN or infinite, or if no completion has a score; after
    three in a row, training ends. In a notebook the dashboard is shown, whose buttons stop the
    training, save a checkpoint, or evaluate `eval_dataset`; in a terminal each step is a line.

    Args:
        trainer: The trainer, before `train()`. A monitor that it already has is replaced.
        folder: Where metrics.jsonl and alerts.jsonl go; by default OUTPUT_DIR/monitor.
        correct: The name of the reward that says what is right; by default not known.
        halt: "grave" ends training at an alert that says stop; "never" does not.
        notify: Called with each alert, a `Check`; for example a function that calls
            `trackio.alert(title=check.name, text=check.evidence)`.
        show: Whether the progress is shown.

    Raises:
        ValueError: `correct` is none of the trainer's rewards, or `halt` is unknown.

    Attributes:
        alerts: The alerts so far.
        failure: Why the monitor stands aside; "" if it works.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        folder: str | Path | None = None,
        correct: str = "",
        halt: Literal["never", "grave"] = "never",
        notify: Callable[[Check], Any] | None = None,
        show: bool = True,
    ) -> None:
        self.trainer, self.correct, self.halt, self.notify = trainer, correct, halt, notify
        self.names = list(trainer.reward_func_names)
        if correct and correct not in self.names:
            names = ", ".join(self.names)
            raise ValueError(f"correct = {correct!r} is none of the rewards: {names}")
        if halt not in ("never", "grave"):
            raise ValueError(f"halt = {halt!r}: give 'never' or 'grave'")
        self.folder = Path(folder or Path(trainer.args.output_dir) / "monitor")
        self.buttons, self.alerts, self.failure = Buttons(), [], ""
        self.watch, self.skipped = Watch(Expected({})), 0
        self.dashboard = _dashboard(self.buttons) if show else None
        self.prints = show and self.dashboard is None
        for other in [c for c in trainer.callback_handler.callbacks if isinstance(c, Monitor)]:
            trainer.remove_callback(other)  # a cell that runs twice
        trainer.add_callback(self)
        if other_class := _not_unsloths(trainer):
            print(other_class)

    @_aside
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or go on after the step of the checkpoint from which training resumes."""
        self.folder.mkdir(parents=True, exist_ok=True)
        facts = of_arguments(args) | of_trainer(self.trainer)
        weights = facts.get("weights") or {}
        ranges = {name: (weights.get(name, 1.0), 0.0, 1.0) for name in self.names}
        self.watch = Watch(
            Expected(
                ranges,
                completions=facts.get("completions", 8),
                max_steps=state.max_steps,
                correct=self.correct,
                max_completion_length=facts.get("max_completion_length", 0),
            )
        )
        self.alerts.clear()
        for line in self._earlier(state.global_step):
            self._widen(line)
            self.alerts += self.watch.feed(line)

    def _earlier(self, steps: int) -> list[dict[str, Any]]:
        """Return the lines up to a step, and drop those after it, which are trained again."""
        path = self.folder / "metrics.jsonl"
        texts = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        lines = [json.loads(text) for text in texts if text.endswith("}")]
        lines = [line for line in lines if line["step"] <= steps] if steps else []
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return lines

    @_aside
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Skip an update whose gradient is not finite, or whose completions have no score."""
        model = kwargs.get("model") or self.trainer.model
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        if scaler is not None:  # fp16 skips such updates itself, and lowers its scale
            gradients = []
        why = self._unscored()
        if not why and not all(bool(gradient.isfinite().all()) for gradient in gradients):
            why = "the gradient is not finite"
        self.skipped = self.skipped + 1 if why else 0
        if why:
            model.zero_grad(set_to_none=True)
            print(f"step {state.global_step + 1}: {why}; no update is made")

    def _unscored(self) -> str:
        scores = self._scores()
        if infinite := [name for name, values in scores.items() if np.isinf(values).any()]:
            return f"{', '.join(infinite)} gave an infinite score"
        if any(map(len, scores.values())) and all(np.isnan(v).all() for v in scores.values()):
            return "no completion has a score, for every reward gave None"
        return ""

    def _scores(self) -> dict[str, np.ndarray]:
        """Return the scores of the latest step, {reward: [completions]}; NaN stands for None."""
        scores = (getattr(self.trainer, "_logs", None) or {}).get("rewards", {})
        plain = {
            name: [math.nan if s is None else s for s in scores.get(name, ())] for name in scores
        }
        return {name: np.array(values, dtype=float) for name, values in plain.items()}

    @_aside
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record every step, and do what the buttons ask for."""
        control.should_log = True
        if self.skipped >= BAD_STEPS:
            print(f"training ends: no update could be made in {BAD_STEPS} steps in a row")
            control.should_training_stop = True
        if self.buttons.stop.is_set():
            control.should_training_stop = control.should_save = True
        if self.buttons.save.is_set():
            self.buttons.save.clear()
            control.should_save = True
        if self.buttons.evaluate.is_set():
            self.buttons.evaluate.clear()
            control.should_evaluate = getattr(self.trainer, "eval_dataset", None) is not None

    @_aside
    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass a line to the alerts, and show it."""
        line = {"step": state.global_step, **renamed(kwargs.get("logs") or {})}
        key = f"eval/rewards/{self.correct}/mean"
        if self.correct and key in line:
            line["eval/accuracy"] = line[key]
        if "reward" not in line and not any(name.startswith("eval/") for name in line):
            return
        self._widen(line)
        alerts = self.watch.feed(line)
        self.alerts += alerts
        self._write("metrics.jsonl", line)
        for alert in alerts:
            self._write("alerts.jsonl", {"step": state.global_step, **alert._asdict()})
            print(summary([alert]))
            if self.notify:
                self.notify(alert)
        if self.halt == "grave" and any(alert.state == "stop" for alert in alerts):
            control.should_training_stop = True
        self._show(line, state, alerts)

    def _widen(self, line: Mapping[str, Any]) -> None:
        """Update the rewards' ranges by what they were seen to give."""
        scores, ranges = self._scores(), {}
        for name, (weight, low, high) in self.watch.expected.rewards.items():
            values = [*scores.get(name, ()), line.get(f"rewards/{name}/mean", math.nan)]
            finite = [float(value) for value in values if math.isfinite(value)] or [low]
            ranges[name] = (weight, min(low, *finite), max(high, *finite))
        self.watch.expected = self.watch.expected._replace(rewards=ranges)

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        plain = {key: v.item() if hasattr(v, "item") else v for key, v in line.items()}
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(plain) + "\n")

    def _show(self, line: Mapping[str, Any], state: Any, alerts: Sequence[Check]) -> None:
        """Show a step on the dashboard, or as a line."""
        if self.dashboard is not None:
            self.dashboard(Update(dict(line), state.max_steps, self.completions(), alerts))
        elif self.prints and "reward" in line:
            parts = [f"{k} {line[k]:{form}}" for k, form in SHOWN if isinstance(line.get(k), float)]
            print(f"step {line['step']}/{state.max_steps}: {', '.join(parts)}")

    def completions(self) -> list[dict[str, Any]]:
        """Return the completions of the latest step: question, completion, each reward, reward."""
        logs, scores = getattr(self.trainer, "_logs", None) or {}, self._scores()
        texts, prompts = list(logs.get("completion", ())), list(logs.get("prompt", ()))
        advantages = list(logs.get("advantages", ())) or [math.nan] * len(texts)
        weights = {name: weight for name, (weight, *_) in self.watch.expected.rewards.items()}
        rows = []
        for place, (prompt, text) in enumerate(zip(prompts, texts, strict=False)):
            each = {name: float(values[place]) for name, values in scores.items()}
            total = sum(weights.get(name, 1.0) * np.nan_to_num(v) for name, v in each.items())
            row = {"question": completion_text(prompt), "completion": completion_text(text)}
            rows.append(row | each | {"reward": float(total), "advantage": advantages[place]})
        return rows


def _dashboard(buttons: Buttons) -> Any:
    """Return the dashboard, shown, in a notebook; None elsewhere."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if not shell or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    from grpo_nb.views.dashboard import TrainingDashboard

    dashboard = TrainingDashboard(buttons)
    display(dashboard)
    return dashboard


def _not_unsloths(trainer: Any) -> str:
    """Say so if Unsloth was imported after TRL's trainer, which it then has not replaced."""
    trl = sys.modules.get("trl")
    if "unsloth" not in sys.modules or trl is None or isinstance(trainer, trl.GRPOTrainer):
        return ""
    return (
        "this trainer is not Unsloth's: GRPOTrainer was imported from trl before unsloth. Restart "
        "the kernel and import unsloth first"
    )
