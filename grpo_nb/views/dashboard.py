"""Show training as it runs: the numbers go to the browser at each step, and are drawn there."""

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import anywidget
import traitlets as t

from grpo_nb.views import charts, progress
from grpo_nb.views.progress import Update

EVERY = 1.0  # seconds between what is sent where steps are faster
MOST = {"rows": 1000, "groups": 48}  # of more, every second one is dropped


def _source(suffix: str) -> str:
    """Return uPlot's file of a kind and ours, as one."""
    places = [Path(__file__).with_name(f"{name}.{suffix}") for name in ("uplot", "dashboard")]
    return "\n".join(place.read_text(encoding="utf-8") for place in places)


class TrainingDashboard(anywidget.AnyWidget):
    """Show each `Update` of the trainer.

    Args:
        interrupt: What the notebook's interrupt button does.
    """

    _esm, _css = _source("js"), _source("css")
    spec = t.List([chart._asdict() for chart in (charts.TOTAL, *charts.OTHERS)]).tag(sync=True)
    interrupt = t.Unicode().tag(sync=True)
    now = t.Dict().tag(sync=True)  # sentence, phase, step, and so on
    alerts = t.List().tag(sync=True)
    base = t.List().tag(sync=True)  # of `progress.before_training`
    names = t.List().tag(sync=True)  # the metric in each place of a row
    rows, groups = (t.Unicode().tag(sync=True) for _ in range(2))  # JSON texts: quickly sent
    error = t.Unicode().tag(sync=True)

    def __init__(self, interrupt: str = "") -> None:
        super().__init__(interrupt=interrupt)
        self.correct = ""  # the name of the reward that says what is right, if it is known
        self._at_end: Callable[..., None] | None = None  # what IPython calls at a cell's end
        self._empty()
        self._publish("ready: nothing is trained yet")

    def __repr__(self) -> str:
        return f"{type(self).__name__}: run this notebook to use it"

    def _empty(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.step, self.total_steps, self._eval_rows = 0, 0, 0
        self.is_over, self.phase, self._sent = False, "", 0.0
        self._texts: dict[str, list[str]] = {"rows": [], "groups": []}
        with self.hold_sync():
            self.alerts = self.base = self.names = []
            self.rows = self.groups = self.error = ""

    def __call__(self, update: Update, sends: bool = True) -> None:
        """Take an update, and send it to the browser now or with one of the next."""
        with self._guarded():
            line = charts.finite(update.line)
            if "eval/accuracy" in line:  # which says it all
                line.pop("eval/reward", None)
            self.step, self.total_steps = int(line.get("step", self.step)), update.total_steps
            self.lines.append(line | {"step": self.step})
            self.is_over = self.step >= self.total_steps
            self._texts["rows"].append(self._row(self.lines[-1]))
            if update.completions:
                group = progress.one_group(self.step, update.completions)
                self._texts["groups"].append(json.dumps(group))
            for name, texts in self._texts.items():
                if len(texts) > MOST[name]:
                    del texts[1:-1:2]
            for name, state, evidence, fix in update.alerts:
                text = progress.alert_text(name, evidence, fix)
                alert = {"step": self.step, "state": state, "text": text, "evidence": evidence}
                self.alerts = [*self.alerts, alert]
            self.base = self.base or progress.before_training(self.lines, self._eval_rows)
            if sends:
                self._publish(self.phase, is_short=not (self.is_over or update.alerts))

    def begin(self, updates: Iterable[Update], total_steps: int, eval_rows: int = 0) -> None:
        """Show a training that begins, or goes on after these updates.

        Args:
            updates: What was trained before.
            total_steps: The number of steps of the training.
            eval_rows: The number of validation prompts; 0 if it is not known.
        """
        self._empty()
        self.total_steps, self._eval_rows = total_steps, eval_rows
        for update in updates:
            self(update, sends=False)
        self.say("getting ready for the next step")
        if shell := sys.modules.get("IPython") and sys.modules["IPython"].get_ipython():
            self._at_end = lambda _: self.rest()
            shell.events.register("post_run_cell", self._at_end)

    def say(self, phase: str, is_short: bool = False) -> None:
        """Show what runs now; a short phase may be left out where steps are fast."""
        with self._guarded():
            self._publish(phase, is_short)

    def rest(self) -> None:
        """Show that training has ended, or its cell."""
        self.is_over = True
        if self._at_end:
            shell = sys.modules["IPython"].get_ipython()
            shell.events.unregister("post_run_cell", self._at_end)
            self._at_end = None
        how = "finished" if self.step >= self.total_steps else "ended"
        self.say(f"{how} after step {self.step}")

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Show an exception of the block, and let the training go on."""
        try:
            yield
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"

    def _row(self, line: Mapping[str, float]) -> str:
        """Return a line's values in the places of `names` as JSON, with new keys at the end."""
        if new := [key for key in line if key not in self.names]:
            self.names = [*self.names, *new]
        values = [line.get(key) for key in self.names]
        return json.dumps([v if v is None else float(f"{v:.5g}") for v in values])

    def _publish(self, phase: str, is_short: bool = False) -> None:
        """Send what is new, unless it is short and something was sent just now."""
        self.phase = phase
        if is_short and time.monotonic() < self._sent + EVERY:
            return
        facts = (self.base, self.total_steps, self.correct)
        gravity, text = progress.sentence(self.lines, self.alerts, *facts)
        with self.hold_sync():
            self.rows, self.groups = (f"[{','.join(texts)}]" for texts in self._texts.values())
            self.now = {
                **{"gravity": gravity, "sentence": text, "phase": phase, "step": self.step},
                **{"total": self.total_steps, "over": self.is_over, "pace": self._pace()},
            }
        self._sent = time.monotonic()

    def _pace(self) -> str:
        """Return the seconds of a step, and the time that is left."""
        seconds = [line["step_time"] for line in self.lines[-40:] if "step_time" in line][-20:]
        if not seconds:
            return ""
        pace = sum(seconds) / len(seconds)
        left = timedelta(seconds=round((self.total_steps - self.step) * pace))
        return f"{pace:.3g} s per step" + ("" if self.is_over else f" · about {left} left")
