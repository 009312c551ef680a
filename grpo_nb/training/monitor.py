"""Watch the training of any `trl.GRPOTrainer`, whoever built it: `Monitor(trainer)`.

    trainer = GRPOTrainer(…)
    with Monitor(trainer):  # an interrupt, or an error, saves first
        trainer.train()

The monitor raises the alerts of `training.health`, writes a line for each step, and skips updates
that would ruin the weights. It reads what TRL logs, including validations on an `eval_dataset`.
"""

import functools
import math
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from transformers import TrainerCallback

from grpo_nb import ranks
from grpo_nb.checks import Check, Update, Watcher
from grpo_nb.files import append_line, read_lines
from grpo_nb.models import use_torch_head
from grpo_nb.names import refuse_unknown
from grpo_nb.rewards import declared_range
from grpo_nb.rewards.prompts import message_text, transcript
from grpo_nb.training import health, preflight, stock
from grpo_nb.training.interruptions import (
    forget_after,
    keep_last_step,
    newest_checkpoint,
    step_of,
    stop_on_signals,
    times_of,
)
from grpo_nb.training.logs import of_trainer, renamed
from grpo_nb.training.placebo import true_reward

BAD = 3  # generations without an update, in a row, before training ends
REMEDY = (
    "Repair a reward that gives None or NaN, or what it calls (a server, a file); else lower the "
    "learning_rate, or load the model in 16 bits"
)
METRICS = "metrics.jsonl"
INTERRUPT = "To stop: the notebook's interrupt button, which saves and stops after the step"
AGAIN = "run this again to continue from there, or use what is trained so far"  # in a run
SHOWN = (
    ("reward", ".3g"),
    ("reward_std", ".2g"),
    ("completions/mean_length", ".0f"),
    ("kl", ".2g"),
)


def _aside(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that a monitor that fails says so once, and lets the training go on."""

    @functools.wraps(method)
    def guarded(self: "Monitor", *args: Any, **kwargs: Any) -> Any:
        if self.failure:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # whatever it is, it is no reason to end a training
            self.failure = f"{type(error).__name__}: {error}"
            step = self.trainer.state.global_step
            print(f"the monitor stands aside from step {step} on: {self.failure}")
            return None

    return guarded


class Monitor(TrainerCallback):
    """Raise alerts beside a trainer, show its progress, and skip updates that ruin the weights.

    An update is skipped if its gradient is infinite or NaN, if a score is infinite, or if no
    completion has a score; after three generations without an update, training ends. Every step is
    logged, whatever the trainer's logging_steps are. A notebook shows the dashboard; in a terminal
    each step is a line.

    Args:
        trainer: The trainer, before `train()`. A monitor that it already has is replaced.
        folder: Where metrics.jsonl and alerts.jsonl go; by default OUTPUT_DIR/monitor.
        correct: The name of the reward that says what is right; by default not known.
        halt: "grave" ends training at an alert that says stop; "never" does not.
        notify: Called with each alert, a `Check`; for example a function that calls
            `trackio.alert(title=check.name, text=check.evidence)`.
        ignore: Names of alerts that are not raised.
        show: Whether the progress is shown.

    Raises:
        ValueError: `correct` is none of the trainer's rewards, or `halt` is unknown.

    Attributes:
        alerts: The alerts so far.
        watchers: Functions that are called with each `Update`.
        stop: An event; once it is set, training ends after the current step, with a checkpoint.
        failure: Why the monitor stands aside; "" if it works.
        ended: Why the monitor ended the training; "" if it did not.
    """

    def __init__(
        self,
        trainer: Any,
        *,
        folder: str | Path | None = None,
        correct: str = "",
        halt: Literal["never", "grave"] = "never",
        notify: Callable[[Check], Any] | None = None,
        ignore: Collection[str] = (),
        show: bool = True,
    ) -> None:
        use_torch_head()
        self.trainer, self.halt = trainer, halt
        self.names = list(trainer.reward_func_names)
        if correct:
            refuse_unknown("reward", correct, self.names)
        if halt not in ("never", "grave"):
            raise ValueError(f"halt = {halt!r}: give 'never' or 'grave'")
        of_run = getattr(trainer, "monitor_options", {})  # what a run's trainer has set
        self.notify, self.correct = notify, correct or of_run.get("correct", "")
        default = of_run.get("folder") or Path(trainer.args.output_dir) / "monitor"
        self.folder = Path(folder or default)
        self.ignore = {*ignore} or of_run.get("ignore", set())
        self.watchers: list[Watcher] = []
        self.stop = threading.Event()
        self.alerts: list[Check] = []
        self.failure = self.ended = ""
        self._exits: list[ExitStack] = []
        self.before: dict[int, int] = {}  # checkpoints of another training; see `times_of`
        self.stopped = False  # whether a request to stop ended the last training
        self.watch, self.skipped = health.Watch(health.Expected({})), 0
        self.updated = self.validated = False
        self.dashboard = _dashboard() if show else None
        self.prints = show and self.dashboard is None
        # It comes first, so that the others see what it has decided.
        stock.add_callback(trainer, self, first=True)

    def __enter__(self) -> "Monitor":
        """Save a checkpoint if an interrupt (after the current step) or an error ends training.

        Without `with`, training is watched all the same, and an interrupt ends it at once. A run's
        trainer enters this context itself.
        """
        self.stop.clear()
        self.stopped = False
        self._exits.append(ExitStack())
        self.interrupts = self._exits[-1].enter_context(stop_on_signals(self.stop))
        if self.dashboard is not None:
            self.dashboard.interrupt = INTERRUPT
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raise an error if training was stopped or gave up, so that later cells do not run.

        Raises:
            KeyboardInterrupt: Training was stopped by an interrupt, a signal, or `stop`.
            RuntimeError: Training gave up, because no update was possible any more.
        """
        self._exits.pop().close()
        trainer, step = self.trainer, self.trainer.state.global_step
        if isinstance(error, Exception):
            keep_last_step(trainer, error, self._newest())
            error.add_note(self._goes_on() or "every step is trained")
            if preflight.is_out_of_memory(error):
                error.add_note(f"memory ran out: {preflight.SMALLER}")
        if error is None and self.ended:
            raise RuntimeError(self.ended)
        early = self.stopped and step < trainer.state.max_steps
        if error is None and ranks.anywhere(bool(self.interrupts) or early):
            ending = filter(None, (f"stopped after step {step}", self._goes_on()))
            raise KeyboardInterrupt("; ".join(ending))

    def _goes_on(self) -> str:
        """Say what is kept of a training that ended early, and how to resume it; "" otherwise."""
        state, newest = self.trainer.state, self._newest()
        if 0 < state.max_steps <= state.global_step:
            return ""
        if not newest:
            return "no checkpoint is kept"
        again = f"the same `with` goes on with trainer.train(resume_from_checkpoint={newest!r})"
        again = AGAIN if hasattr(self.trainer, "monitor_options") else again
        return f"the training is kept up to step {step_of(newest)}; {again}"

    def _newest(self) -> str | None:
        """Return this training's newest checkpoint; those of earlier trainings do not count."""
        return newest_checkpoint(self.trainer.args.output_dir, but=self.before)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin, or go on after the step of the checkpoint from which training resumes."""
        stock.call_once(self.trainer, self)
        self.failure = ""
        self.begin(state.global_step, state.max_steps)

    @_aside
    def begin(self, step: int, max_steps: int) -> None:
        """Read the metrics up to a step, and delete those of later steps.

        Args:
            step: The last step that has been trained so far; 0 at the beginning.
            max_steps: The number of steps of the training.
        """
        times = times_of(self.trainer.args.output_dir)
        self.before = {s: time for s, time in times.items() if s != step}  # it goes on from `step`
        self.ended, self.skipped = "", 0
        self.updated = self.validated = False  # in this generation; since it was sampled
        self.watch = health.Watch(self._expected(max_steps))
        self.alerts.clear()
        if ranks.is_main():
            self.folder.mkdir(parents=True, exist_ok=True)
            forget_after(self.folder, step)
        updates = []
        for line in read_lines(self.folder / METRICS):
            self._widen(line)
            updates.append(Update(line, max_steps, [], self._raised(line)))
        self.alerts += [alert for update in updates for alert in update.alerts]
        if self.dashboard is not None:
            self.dashboard.correct = self.watch.correct
            self.dashboard.begin(updates, max_steps, self.watch.expected.eval_rows)
        self._widen({})

    def _expected(self, max_steps: int) -> health.Expected:
        facts, ranges = of_trainer(self.trainer), {}
        for name, func in zip(self.names, self.trainer.reward_funcs, strict=True):
            func = true_reward(func)
            func = getattr(func, "reward", func)  # the one whose weight is adapted
            ranges[name] = (facts["weights"][name], *declared_range(func))
        rows = getattr(self.trainer, "validation_rows", None)  # a run's
        rows = getattr(self.trainer, "eval_dataset", None) if rows is None else rows
        return health.Expected(
            ranges,
            completions=facts["completions"],
            eval_rows=len(rows) if hasattr(rows, "__len__") else 0,
            max_steps=max_steps,
            correct=self.correct,
            max_completion_length=facts["max_completion_length"] or 0,
        )

    @_aside
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Skip an update whose gradient is not finite, or whose completions have no score.

        An infinite or NaN gradient would ruin every weight; without scores, nothing is learnt.
        Overflows that only lower the loss scale of fp16 do not count.
        """
        model, step = self.trainer.model, state.global_step + 1
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        infinite = ranks.anywhere(not finite)
        why = self._fault()
        scaler = getattr(self.trainer.accelerator, "scaler", None)
        overflows = infinite and not why and scaler and scaler.get_scale() > 1
        why = why or ("the gradient is not finite (NaN or inf)" if infinite else "")
        self.updated |= not why or bool(overflows)
        if stock.generation_is_used_up(args, step):
            self.skipped, self.updated = 0 if self.updated else self.skipped + 1, False
        if not why:
            return
        model.zero_grad(set_to_none=True)
        if overflows:  # torch's GradScaler begins at 65,536, and halves its scale after each
            why = f"fp16 overflows at a loss scale of {scaler.get_scale():g}"
        print(f"step {step}: {why}; no update is made")
        if self.skipped == BAD:
            count = f"no update could be made with {BAD} generations in a row, up to step {step}"
            self.ended = f"{why}, and {count}. {REMEDY}"
            print(f"training ends: {self.ended}")

    def _fault(self) -> str:
        """Return what is wrong with the scores of this step's completions; "" if nothing is.

        After a validation, the logged scores are those of the validation's completions, and are not
        examined.
        """
        scores = pd.DataFrame() if self.validated else self._scores()
        if names := [name for name in scores if np.isinf(scores[name]).any()]:
            return f"{', '.join(names)} gave an infinite score"
        if scores.size and scores.isna().all(axis=None):
            return "no completion has a score, for every reward gave None or NaN"
        return ""

    def _scores(self) -> pd.DataFrame:
        """Return the scores that TRL has logged, [completions, rewards]; NaN stands for None."""
        logs = (getattr(self.trainer, "_logs", None) or {}).get("rewards", {})
        columns = {name: logs[name] for name in self.names if len(logs.get(name, ()))}
        return pd.DataFrame({name: list(column) for name, column in columns.items()}, dtype=float)

    def say(self, phase: str, is_short: bool = False) -> None:
        """Show what runs now.

        Args:
            phase: What runs, in a few words.
            is_short: Whether the phase may be left out: always in a terminal, and on a dashboard if
                steps are fast.
        """
        if self.dashboard is not None:
            self.dashboard.say(phase, is_short)
        elif self.prints and not is_short and ranks.is_main():
            print(f"{phase} …")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say which step runs."""
        if stock.generation_is_used_up(args, state.global_step):
            self.validated = False
        self.say(f"training step {state.global_step + 1}", is_short=state.global_step > 0)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remember that TRL's latest scores are a validation's, not those of training."""
        self.validated = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Show that training has ended, and move the request to stop from `stop` to `stopped`."""
        if self.dashboard is not None:
            self.dashboard.rest()
        self.stopped = self.stop.is_set()
        self.stop.clear()

    @_aside
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record every step, and stop if requested."""
        control.should_log = True
        self._obey(args, state, control)

    def _obey(self, args: Any, state: Any, control: Any) -> None:
        """Stop if requested, but only when the completions of a generation are used up."""
        if not stock.generation_is_used_up(args, state.global_step):
            return
        if self.ended:
            control.should_training_stop = True
        if ranks.anywhere(self.stop.is_set()):
            control.should_training_stop = control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass the metrics of a step or a validation to the alerts, and show them."""
        logs = kwargs.get("logs") or {}
        line = {"step": state.global_step, **renamed(logs)}
        # The summary at the end of a training is neither.
        if "loss" in logs or any(name.startswith("eval/") for name in line):
            if update := self._update(line, control):
                for watcher in self.watchers:  # their errors are the person's own
                    watcher(update)
            if state.global_step:  # a request may have come in meanwhile
                self._obey(args, state, control)

    @_aside
    def _update(self, line: dict[str, Any], control: Any) -> Update | None:
        """Write a line and the alerts that it raises, show them, and return them as an `Update`."""
        self._widen(line)
        alerts = self._raised(line)
        self.alerts += alerts
        if self.halt == "grave" and any(alert.state == "stop" for alert in alerts):
            control.should_training_stop = True
        if not ranks.is_main():
            return None
        append_line(self.folder / METRICS, _plain(line))
        for alert in alerts:
            append_line(self.folder / "alerts.jsonl", {"step": line["step"], **alert._asdict()})
            print(health.summary([alert]))
            if self.notify:
                self.notify(alert)
        completions = self.completions() if {"loss", "reward"} <= line.keys() else []
        update = Update(line, self.trainer.state.max_steps, completions, alerts)
        if self.dashboard is not None:
            self.dashboard(update)
        elif self.prints and "reward" in line:
            parts = [f"{k} {line[k]:{form}}" for k, form in SHOWN if isinstance(line.get(k), float)]
            print(f"step {line['step']}/{update.total_steps}: {', '.join(parts)}")
        return update

    def _raised(self, line: Mapping[str, Any]) -> list[Check]:
        return [alert for alert in self.watch.feed(line) if alert.name not in self.ignore]

    def _widen(self, line: Mapping[str, Any]) -> None:
        """Update the ranges of rewards that declare no range, by the scores that they gave."""
        scores = self._scores()
        for name, func in zip(self.names, self.trainer.reward_funcs, strict=True):
            if not hasattr(true_reward(func), "range"):
                means = [each.get(f"rewards/{name}/mean") for each in (*self.watch.lines, line)]
                self.watch.widen(name, [*scores.get(name, ()), means[-1]])
                self.watch.settle(name, means)

    def completions(self) -> list[dict[str, Any]]:
        """Return the latest step's completions, with question, advantage, and scores.

        Each has an entry for every reward, and the weighted total under the key "reward".
        """
        logs, scores = getattr(self.trainer, "_logs", None) or {}, self._scores()
        prompts, texts = list(logs.get("prompt", ())), list(logs.get("completion", ()))
        if not len(scores) == len(texts) == len(prompts):
            return []
        weights = dict(zip(self.names, self.trainer.reward_weights.tolist(), strict=True))
        table = scores.assign(
            question=[p if isinstance(p, str) else message_text(p[-1]) for p in prompts],
            completion=list(map(transcript, texts)),
            advantage=list(logs.get("advantages", ())) or math.nan,
            reward=scores.fillna(0) @ np.array([weights[name] for name in scores]),
        )
        if images := list(logs.get("images") or ()):
            table["images"] = images
        return table.to_dict("records")


def _plain(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.item() if hasattr(value, "item") else value for key, value in line.items()}


def _dashboard() -> Any:
    """Show a dashboard and return it if this is a notebook; return None elsewhere."""
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if not shell or not hasattr(shell, "kernel"):
        return None
    from IPython.display import display

    from grpo_nb.views.dashboard import TrainingDashboard

    dashboard = TrainingDashboard()
    display(dashboard)
    return dashboard
