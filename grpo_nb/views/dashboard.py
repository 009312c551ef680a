"""Show training as it runs: progress, alerts, charts, three completions, and buttons."""

import random
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb.updates import Buttons, Update
from grpo_nb.views import charts, tables
from grpo_nb.views.widgets import View

ALERTS = 20  # number of alerts shown
SHARE = 0.01  # largest share of the training time that is spent on drawing
FIRST = 5  # time before the first drawing, so that it shows curves [s]
WISHES = {  # for each of `Buttons`: button, tooltip, and status once the button is pressed
    "stop": ("Stop after this step", "End the training", "stops after the step in progress"),
    "save": ("Save now", "Write a checkpoint", "saves a checkpoint after this step"),
    "evaluate": ("Evaluate now", "On the validation split", "validates after this step"),
}


class TrainingDashboard(View):
    """Show each `Update` of the trainer; a click sets the trainer's button of the same name.

    The buttons work during training if the kernel handles widget messages on a subshell:
    ipykernel >= 7 under JupyterLab >= 4.4, whose setting "Kernel Comms over subshells" is on by
    default. Elsewhere, such as on Colab (ipykernel 6), the curves are still updated, but a click
    takes effect only after the cell has ended; use the notebook's interrupt button there.

    Args:
        buttons: The trainer's buttons; several dashboards may share them.
        validates: Whether there is something to validate on.
    """

    def __init__(self, buttons: Buttons, validates: bool = True) -> None:
        super().__init__()
        import matplotlib.pyplot  # noqa: F401 (now, and not while the model trains)

        self.buttons = buttons
        self.lines: list[dict[str, float]] = []
        self.alerts: list[dict[str, Any]] = []
        self.sample: Sequence[Mapping[str, Any]] = ()
        self.step, self.total_steps, self.ended = 0, 0, False
        self._due: float | None = None  # time of the next drawing
        self._showing = threading.Lock()
        parts = self.header, self.wishes, self.listed, self.curves, self.completions = [
            w.HTML() for _ in range(5)
        ]
        self.button_widgets = {
            name: self.button(label, tooltip, partial(self._wish, name))
            for name, (label, tooltip, _) in WISHES.items()
            if validates or name != "evaluate"
        }
        row = w.HBox([*self.button_widgets.values(), self.wishes])
        self.children = [self.header, row, self.errors, *parts[2:]]
        self._show_wishes()
        self.header.value = self._progress()

    def __call__(self, update: Update) -> None:
        """Show an update; charts and completions are redrawn less often."""
        self.guard(partial(self._take, update))

    def _take(self, update: Update) -> None:
        values = charts.finite(update.line)
        self.step, self.total_steps = int(values.get("step", self.step)), update.total_steps
        self.lines.append(values | {"step": self.step})
        self.sample = update.completions or self.sample
        self.ended = self.step >= self.total_steps or self.buttons.stop.is_set()
        self._show_wishes()
        self.header.value = self._progress()
        if update.alerts:
            self.alerts += [{"step": self.step, **alert._asdict()} for alert in update.alerts]
            self.listed.value = self._alert_list()
        start = time.monotonic()
        if self._due is None:
            self._due = start + FIRST
        if start >= self._due or self.ended:
            self.draw()
            end = time.monotonic()  # the longer a drawing takes, the later comes the next
            self._due = end + (end - start) / SHARE

    def draw(self) -> None:
        """Draw the completions and all charts."""
        self.completions.value = self._completion_table()
        self.curves.value = charts.image(self.lines)

    def _wish(self, name: str) -> None:
        getattr(self.buttons, name).set()
        self._show_wishes()

    def _show_wishes(self) -> None:
        """Show pending requests, and disable their buttons until the trainer has acted on them.

        After the last step all buttons are disabled. Clicks and updates come from two threads, so a
        lock ensures that the latest state is shown.
        """
        with self._showing:
            requests = [name for name in WISHES if getattr(self.buttons, name).is_set()]
            status = "; ".join(WISHES[name][2] for name in requests)
            if self.ended:
                early = f"stopped after step {self.step}, with a checkpoint"
                status = early if self.step < self.total_steps else ""
            self.wishes.value = f"<span role='status'>{status}</span>"
            for name, button in self.button_widgets.items():
                button.disabled = self.ended or name in requests

    def _progress(self) -> str:
        """Return the step, a progress bar, the speed, the time left and the memory use as HTML."""
        parts, steps = [], [line for line in self.lines if "step_time" in line][-20:]
        if steps:
            pace = sum(line["step_time"] for line in steps) / len(steps)
            seconds = round((self.total_steps - self.step) * pace)
            end = "finished" if self.step >= self.total_steps else "stopped"
            time_left = f"about {timedelta(seconds=seconds)} left"
            parts = [f"{pace:.3g} s per step", end if self.ended else time_left]
        for key, form in (("tokens_per_second", "{:,.0f} tokens/s"), ("memory_gib", "{:.2f} GiB")):
            parts += [form.format(line[key]) for line in steps[-1:] if key in line]
        label = f"step {self.step} of {self.total_steps}"
        return (
            f"<div style='display:flex;gap:14px;align-items:center;flex-wrap:wrap'>"
            f"<b>{label}</b><progress aria-label='{label}' value='{self.step}' "
            f"max='{max(1, self.total_steps)}' style='flex:1;min-width:120px'></progress>"
            f"<span>{' · '.join(parts)}</span></div>"
        )

    def _alert_list(self) -> str:
        """Return the alerts as HTML, sorted by state ("stop" first) and then newest first."""
        alerts = sorted(self.alerts, key=lambda alert: (alert["state"] != "stop", -alert["step"]))
        more = len(alerts) - ALERTS
        rest = f"<p>and {more} more, in alerts.jsonl</p>" if more > 0 else ""
        return tables.table(pd.DataFrame(alerts[:ALERTS])) + rest

    def _completion_table(self) -> str:
        """Render the best, the worst and a random completion of the latest step that has any."""
        if not self.sample:
            return ""
        frame = pd.DataFrame(list(self.sample)).sort_values("reward", na_position="first")
        # A separate generator, so that the trainer's random state is unchanged.
        other = random.Random(self.step).choice(range(len(frame))[1:-1] or [0])
        frame = frame.iloc[[-1, 0, other]].set_axis(["best", "worst", "random"])
        return tables.completions(frame.rename(columns={"reward": "total"}))
