"""A training as it runs: progress, alerts, charts, three completions, and buttons."""

import math
import random
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb.training import Controls, Update
from grpo_nb.views import charts, tables
from grpo_nb.views.widgets import View

ALERTS = 20  # shown
NOT_REWARDS = {"question", "completion", "reward", "advantage"}
SHARE = 0.02  # of the time, at most, goes into pictures of the curves
WISHES = {  # of Controls: the button, what it does, and what is said once it is pressed
    "stop": ("Stop after this step", "Ends the training", "stops after the step that runs now"),
    "save": ("Save now", "Writes a checkpoint", "a checkpoint follows the step that runs now"),
    "evaluate": ("Evaluate now", "On the validation split", "a validation follows this step"),
}


class TrainingDashboard(View):
    """Shows each `Update` it is called with; its buttons set the training's controls.

    The buttons work while the training's cell runs where the kernel takes widget messages on
    a subshell: ipykernel >= 7 under JupyterLab >= 4.4, whose setting "Kernel Comms over
    subshells" is on by default. Elsewhere, as on Colab (ipykernel 6), curves still move, but a
    click is not seen before the cell ends; use the notebook's interrupt button there.

    Args:
        controls: The trainer's; several dashboards may share them.
    """

    def __init__(self, controls: Controls) -> None:
        super().__init__()
        self.controls = controls
        self.lines: list[dict[str, float]] = []
        self.alerts: list[dict[str, Any]] = []
        self.sample: Sequence[Mapping[str, Any]] = ()
        self.step, self.total_steps = 0, 0
        self._due = 0.0  # before then no other picture
        self._showing = threading.Lock()
        parts = self.header, self.wishes, self.listed, self.curves, self.completions = [
            w.HTML() for _ in range(5)
        ]
        self.buttons = {
            name: self.button(label, tooltip, partial(self._wish, name))
            for name, (label, tooltip, _) in WISHES.items()
        }
        row = w.HBox([*self.buttons.values(), self.wishes])
        self.children = [self.header, row, self.errors, *parts[2:]]
        self._show_wishes()
        self.header.value = self._progress()

    def __call__(self, update: Update) -> None:
        """Take an update; pictures and completions follow at their own pace."""
        self.guard(partial(self._take, update))

    def _take(self, update: Update) -> None:
        values = charts.numbers(update.line)
        self.step, self.total_steps = int(values.get("step", self.step)), update.total_steps
        self.lines.append(values | {"step": self.step})
        self.sample = update.completions or self.sample
        self._show_wishes()
        self.header.value = self._progress()
        if update.alerts:
            self.alerts += [{"step": self.step, **alert._asdict()} for alert in update.alerts]
            self.listed.value = self._alert_list()
        last = self.step >= self.total_steps or self.controls.stop.is_set()
        began = time.monotonic()
        if began < self._due and not last:
            return
        # A picture takes a part of a second: the longer it took, the later the next one.
        self.draw()
        ended = time.monotonic()
        self._due = ended + (ended - began) / SHARE

    def draw(self) -> None:
        """Completions, and every chart that has something to show, as one picture."""
        self.completions.value = self._completion_table()
        self.curves.value = charts.image(self.lines)

    def _wish(self, name: str) -> None:
        getattr(self.controls, name).set()
        self._show_wishes()

    def _show_wishes(self) -> None:
        """A request stands until the training has taken it, and cannot be repeated before.

        A click and the training's update show them from two threads; the later has the last word.
        """
        with self._showing:
            asked = [name for name in WISHES if getattr(self.controls, name).is_set()]
            said = "; ".join(WISHES[name][2] for name in asked)
            self.wishes.value = f"<span role='status'>{said}</span>"
            for name, button in self.buttons.items():
                button.disabled = name in asked

    def _progress(self) -> str:
        """Step, progress, speed, time left, and memory."""
        parts, steps = [], [line for line in self.lines if "step_time" in line][-20:]
        if steps:
            pace = sum(line["step_time"] for line in steps) / len(steps)
            left = (self.total_steps - self.step) * pace
            parts = [f"{pace:.3g} s a step"]
            parts.append(f"about {timedelta(seconds=round(left))} left" if left > 0 else "finished")
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
        """Alerts, those that stop first, then the newest."""
        alerts = sorted(self.alerts, key=lambda one: (one["state"] != "stop", -one["step"]))
        more = len(alerts) - ALERTS
        rest = f"<p>and {more} more, in train/health.jsonl</p>" if more > 0 else ""
        return tables.table(pd.DataFrame(alerts[:ALERTS])) + rest

    def _completion_table(self) -> str:
        """The best, the worst and some other completion of the latest step that has any."""
        if not self.sample:
            return ""
        ranked = sorted(self.sample, key=lambda c: charts.numbers(c).get("reward", -math.inf))
        # A generator of its own: the training's seed stays untouched.
        other = random.Random(self.step).choice(ranked[1:-1] or ranked)
        columns = ranked[0].items()
        names = [n for n, v in columns if n not in NOT_REWARDS and not isinstance(v, str)]
        head = ["", "prompt", "completion", *map(tables.short, names), "total", "advantage"]
        lines = []
        for kind, one in {"best": ranked[-1], "worst": ranked[0], "random": other}.items():
            texts = [tables.read(str(one[key]), None)[0] for key in ("question", "completion")]
            scores = [charts.shown(one.get(name), ".3g") for name in [*names, "reward"]]
            lines.append([kind, *texts, *scores, charts.shown(one.get("advantage"), "+.2f")])
        return tables.Page(tables.markup(head, lines))
