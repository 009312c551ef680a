"""The live dashboard of a training, and the buttons that reach it while it runs."""

import html
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as w

from grpo_nb.training.control import Controls, Update
from grpo_nb.views.dashboard_page import Dashboard

REDRAW = 0.25  # least time between two [s]
SHARE = 0.02  # of the time, at most, goes into the picture of the curves
PARTS = ("header", "alert_list", "curves", "legend", "completions")  # of the view
WISHES = {  # of Controls: the button, what it does, and what is said once it is pressed
    "stop": ("Stop after this step", "Ends the training", "stops after the step that runs now"),
    "save": ("Save now", "Writes a checkpoint", "a checkpoint follows the step that runs now"),
    "evaluate": ("Evaluate now", "On the prompts set aside", "a validation follows this step"),
}


class TrainingDashboard(w.VBox):
    """Shows each `Update` it is called with; its `controls` carry the buttons' wishes.

    The buttons work while the training's cell runs where the kernel takes widget messages on
    a subshell: ipykernel >= 7 under JupyterLab >= 4.4, whose setting "Kernel Comms over
    subshells" is on by default. Elsewhere, as on Colab (ipykernel 6), curves still move, but a
    click is not seen before the cell ends; use the notebook's interrupt button there.
    """

    def __init__(self) -> None:
        self.controls, self.view = Controls(), Dashboard()
        self._lock, self._timer, self._drawn = threading.RLock(), None, 0.0
        self._curves_due = 0.0  # before then no other picture
        self.wishes, self.errors = w.HTML(), w.HTML()
        self.parts = {name: w.HTML() for name in PARTS}
        self.buttons = {
            name: w.Button(description=label, tooltip=tooltip, layout=w.Layout(width="auto"))
            for name, (label, tooltip, _) in WISHES.items()
        }
        for name, button in self.buttons.items():
            button.on_click(partial(self._guard, partial(self._wish, name)))
        self.hold = w.ToggleButton(description="Hold these", tooltip="Completions stay on screen")
        self.hold.observe(partial(self._guard, self._draw), "value")
        row = w.HBox([*self.buttons.values(), self.wishes])
        head, *body, completions = self.parts.values()
        super().__init__(children=[head, row, self.errors, *body, self.hold, completions])
        self._guard(self._draw)

    def __repr__(self) -> str:
        return "The training dashboard: run this notebook to use it"

    def __call__(self, update: Update) -> None:
        """Take an update; draw it now, or with those that follow within REDRAW seconds.

        The curves follow at their own pace.
        """
        self._guard(partial(self._take, update))

    def _take(self, update: Update) -> None:
        self.view.add(update)
        if (wait := self._drawn + REDRAW - time.monotonic()) <= 0:
            self._draw()
        else:
            self._draw_in(wait)

    def _draw_in(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, partial(self._guard, self._draw))
        self._timer.daemon = True
        self._timer.start()

    def _guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run it; an error is shown here, and the training goes on."""
        try:
            with self._lock:
                action()
        except Exception:
            text = html.escape(traceback.format_exc())
            look = "border-left: 4px solid #d33; padding-left: 8px; white-space: pre-wrap"
            self.errors.value = f"<pre role='alert' style='{look}'>{text}</pre>"

    def _wish(self, name: str) -> None:
        getattr(self.controls, name).set()
        self._show_wishes()

    def _show_wishes(self) -> None:
        """A wish stands till the training has taken it, and cannot be repeated till then."""
        asked = [name for name in WISHES if getattr(self.controls, name).is_set()]
        for name, button in self.buttons.items():
            button.disabled = name in asked
        said = "; ".join(WISHES[name][2] for name in asked)
        self.wishes.value = f"<span role='status'>{said}</span>"
        for control in (*self.buttons.values(), self.hold):
            _heard_on_subshell(control)

    def _draw(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer, self._drawn = None, time.monotonic()
        self._show_wishes()
        self.hold.layout.display = "" if self.view.sample else "none"
        for name, part in self.parts.items():
            if name == "curves":
                self._draw_curves(part)
            elif name != "completions" or not self.hold.value:
                part.value = getattr(self.view, name)()

    def _draw_curves(self, part: w.HTML) -> None:
        """A picture takes a part of a second: the longer it took, the later the next one."""
        last = self.view.step >= self.view.total_steps
        if self._drawn < self._curves_due and not last:
            self._draw_in(self._curves_due - self._drawn)
            return
        part.value = self.view.curves()
        ended = time.monotonic()
        self._curves_due = ended + (ended - self._drawn) / SHARE


def _heard_on_subshell(control: w.Widget) -> None:
    """Let a click go where the browser sends it, and not to the thread that drew the control.

    ipykernel 7.4 remembers the latter, which here is the one that is busy with the cell.
    """
    if control.comm is not None:
        vars(control.comm).pop("_reply_subshell_id", None)
