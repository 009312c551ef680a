"""Show training as it runs: the numbers go to the browser at each step, and are drawn there."""

import json
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import anywidget
import traitlets as t

from grpo_nb.updates import Buttons, Update
from grpo_nb.views import charts, progress
from grpo_nb.views.widgets import in_order

SHARE, FREE = 0.01, 0.5  # largest share of the time that is spent on showing, and what is free [s]
CHUNK = {"rows": 32, "groups": 8}  # how many are sent again at each step until a chunk is full
GROUPS = 48  # groups that are kept: of more, every second one is dropped
WISHES = {  # for each of `Buttons`: what the trainer will do
    "stop": "stops after the step in progress",
    "save": "saves a checkpoint after this step",
    "evaluate": "validates after this step",
}
LARGE = ("validation", "reward, weighted total", "zero-advantage groups")
KEYS = {key for chart in (charts.TOTAL, *charts.OTHERS) for key in (*chart.metrics, *chart.band)}
KEYS |= {"step", "groups/signal", "reward/low", "reward/high", "eval/reward"}


def _source(suffix: str) -> str:
    """Return uPlot's file of a kind and ours, as one."""
    places = [Path(__file__).with_name(f"{name}.{suffix}") for name in ("uplot", "dashboard")]
    return "\n".join(place.read_text(encoding="utf-8") for place in places)


def _spec() -> dict[str, list[dict[str, Any]]]:
    """Return the charts: three large ones, and those that are folded under Diagnostics."""
    by_title = {chart.title: chart._asdict() for chart in (charts.TOTAL, *charts.OTHERS)}
    validation, reward, signal = (by_title.pop(title) for title in LARGE)
    reward["band"] = ["reward/low", "reward/high"]
    signal |= {"title": "groups with a signal", "metrics": ["groups/signal"]}
    total = {**reward, "title": "validation, reward", "metrics": ["eval/reward"], "band": ()}
    return {"large": [validation, total, reward, signal], "diagnostics": list(by_title.values())}


class TrainingDashboard(anywidget.AnyWidget):
    """Show each `Update` of the trainer; a click sets the trainer's button of the same name.

    Buttons are shown where a click reaches the kernel while a cell runs, by a subshell: ipykernel
    7 under JupyterLab 4.4 or later. Elsewhere, such as on Colab, a sentence stands there instead.

    Args:
        buttons: The trainer's buttons; several dashboards may share them.
        validates: Whether there is something to validate on.
        interrupt: What the notebook's interrupt button does, for where no click arrives.
    """

    _esm, _css = _source("js"), _source("css")
    spec = t.Dict(_spec()).tag(sync=True)
    wishes = t.Dict().tag(sync=True)  # the buttons, with what each will do
    interrupt = t.Unicode().tag(sync=True)
    clicks = t.Bool(False).tag(sync=True)  # whether a click arrives while a cell runs
    now = t.Dict().tag(sync=True)  # sentence, phase, step, and so on
    alerts = t.List().tag(sync=True)
    base = t.List().tag(sync=True)  # of `progress.before_training`
    ranges = t.Dict().tag(sync=True)  # {reward: (lowest, highest score)}
    names = t.List().tag(sync=True)  # the metric in each place of a row
    # JSON texts, so that sending takes no time: full chunks, and the chunk that grows.
    rows, new_rows, groups, new_groups = (t.Unicode().tag(sync=True) for _ in range(4))
    error = t.Unicode().tag(sync=True)

    def __init__(
        self, buttons: Buttons, validates: bool = True, interrupt: str = "interrupt stops the cell"
    ) -> None:
        offers = {name: text for name, text in WISHES.items() if validates or name != "evaluate"}
        super().__init__(wishes=offers, interrupt=interrupt)
        self.buttons = buttons
        self.correct = ""  # the name of the reward that says what is right, if it is known
        self.goes_on = lambda: "no checkpoint is kept"  # says how an ended training goes on
        self._sending = threading.Lock()
        self._at_end: Callable[..., None] | None = None  # what IPython calls at a cell's end
        self._began, self._spent = time.monotonic(), 0.0
        self._empty()
        in_order(self)
        self.on_msg(self._receive)
        self._publish("ready: nothing is trained yet")

    def __repr__(self) -> str:
        return f"{type(self).__name__}: run this notebook to use it"

    def _empty(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.step, self.total_steps, self._eval_rows = 0, 0, 0
        self.is_over, self.phase = False, ""
        self._texts: dict[str, list[str]] = {"rows": [], "groups": []}
        self._sealed = {"rows": 0, "groups": 0}  # how many are in full chunks
        with self.hold_sync():
            self.alerts = self.base = self.names = []
            self.rows = self.new_rows = self.groups = self.new_groups = self.error = ""

    def __call__(self, update: Update) -> None:
        """Take an update, and send it to the browser now or with one of the next."""
        self._guard(partial(self._take, update))

    def begin(self, updates: Iterable[Update], total_steps: int, eval_rows: int = 0) -> None:
        """Show a training that begins, or goes on after these updates.

        Args:
            updates: What was trained before.
            total_steps: The number of steps of the training.
            eval_rows: The number of validation prompts; 0 if it is not known.
        """
        groups = self._texts["groups"]
        self._empty()
        self.total_steps, self._eval_rows = total_steps, eval_rows
        for update in updates:
            self._guard(partial(self._take, update, sends=False))
        if not self._texts["groups"]:  # no file holds them
            self._texts["groups"] = [g for g in groups if json.loads(g)["step"] <= self.step]
        self.say("getting ready for the next step")
        if shell := sys.modules.get("IPython") and sys.modules["IPython"].get_ipython():
            self._at_end = lambda cell: self.rest(getattr(cell, "error_in_exec", None))
            shell.events.register("post_run_cell", self._at_end)

    def say(self, phase: str, is_short: bool = False) -> None:
        """Show what runs now; a short phase may be left out where steps are fast."""
        self._guard(partial(self._publish, phase, is_short))

    def rest(self, error: BaseException | None = None, reason: str = "") -> None:
        """Show that training has ended, or its cell; the arguments are those of `ending`."""
        self.is_over = True
        if self._at_end:
            shell = sys.modules["IPython"].get_ipython()
            shell.events.unregister("post_run_cell", self._at_end)
            self._at_end = None
        reason = "stopped by you" if self.buttons.stop.is_set() else reason
        self.say(progress.ending(self.step, self.total_steps, self.goes_on(), error, reason))

    def _guard(self, action: Callable[[], None]) -> None:
        """Run the action; show an exception, and let the training go on."""
        try:
            action()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    def _take(self, update: Update, sends: bool = True) -> None:
        line = progress.with_spread(charts.finite(update.line))
        self.step, self.total_steps = int(line.get("step", self.step)), update.total_steps
        self.lines.append(line | {"step": self.step})
        self.is_over = self.step >= self.total_steps
        self._texts["rows"].append(self._row(self.lines[-1]))
        if update.completions:
            group = progress.one_group(self.step, update.completions)
            self._texts["groups"].append(json.dumps(group))
        if len(self._texts["groups"]) > GROUPS:
            del self._texts["groups"][1::2]
            self._sealed["groups"] = -1
        if update.alerts:
            self.alerts = [*self.alerts, *(self._alert(*alert) for alert in update.alerts)]
        self.base = self.base or progress.before_training(self.lines, self._eval_rows)
        if sends:
            self._publish(self.phase, is_short=not (self.is_over or update.alerts))

    def _alert(self, name: str, state: str, evidence: str, fix: str) -> dict[str, Any]:
        text = progress.alert_text(name, evidence, fix)
        return {"step": self.step, "state": state, "text": text, "evidence": evidence}

    def _row(self, line: Mapping[str, float]) -> str:
        """Return a line's values in the places of `names` as JSON, with new keys at the end."""
        names = [key for key in line if key in KEYS or re.fullmatch("rewards/.*/mean", key)]
        new = [key for key in names if key not in self.names]
        if new:
            self.names = [*self.names, *new]
        values = [line.get(key) for key in self.names]
        return json.dumps([v if v is None else float(f"{v:.5g}") for v in values])

    def _publish(self, phase: str, is_short: bool = False) -> None:
        """Send what is new, unless the share of the time that may be spent is used up."""
        self.phase = phase
        begun = time.monotonic()
        if is_short and self._spent > FREE + SHARE * (begun - self._began):
            return
        with self._sending, self.hold_sync():  # clicks come from a thread of their own
            for name, texts in self._texts.items():
                full = len(texts) // CHUNK[name] * CHUNK[name]
                if full != self._sealed[name]:
                    setattr(self, name, ",".join(texts[:full]))
                    self._sealed[name] = full
                setattr(self, f"new_{name}", ",".join(texts[full:]))
            self.now = self._standing()
        self._spent += time.monotonic() - begun

    def _standing(self) -> dict[str, Any]:
        facts = (self.base, self.total_steps, self.is_over, self.correct)
        gravity, text = progress.sentence(self.lines, self.alerts, *facts)
        requests = [name for name in self.wishes if getattr(self.buttons, name).is_set()]
        return {
            **{"gravity": gravity, "sentence": text, "phase": self.phase, "step": self.step},
            **{"total": self.total_steps, "over": self.is_over, "requests": requests},
            "figures": self._figures(),
        }

    def _figures(self) -> str:
        """Return the speed, the time left and the memory use."""
        steps = [line for line in self.lines[-40:] if "step_time" in line][-20:]
        if not steps:
            return ""
        pace = sum(line["step_time"] for line in steps) / len(steps)
        parts = [f"{pace:.3g} s per step"]
        if not self.is_over:
            seconds = round((self.total_steps - self.step) * pace)
            parts.append(f"about {timedelta(seconds=seconds)} left")
        for key, form in (("tokens_per_second", "{:,.0f} tokens/s"), ("memory_gib", "{:.2f} GiB")):
            parts += [form.format(line[key]) for line in steps[-1:] if key in line]
        return " · ".join(parts)

    def _receive(self, _: Any, content: Mapping[str, Any], buffers: Any) -> None:
        """Take a message of the browser: a view that is ready, or a click."""
        if content.get("press") in self.wishes:
            getattr(self.buttons, content["press"]).set()
            self.say(self.phase)
        elif "ready" in content:  # a subshell's thread answers while a cell runs
            self.clicks |= threading.current_thread() is not threading.main_thread()
