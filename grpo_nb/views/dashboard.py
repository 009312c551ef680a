"""A training as it runs: progress, alerts, charts, three completions, and buttons."""

import html
import math
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import ipywidgets as w

from grpo_nb.runs import Check
from grpo_nb.training import Controls, Update
from grpo_nb.training.health import section
from grpo_nb.views import charts, tables
from grpo_nb.views.widgets import WIDE, View

ALERTS = 20  # shown
EDGES = {"stop": "#d33", "warning": charts.ORANGE}
NOT_REWARDS = {"question", "completion", "reward", "advantage"}
REPOSITORY = "https://github.com/grpo-nb/grpo_nb/blob/main"
SHARE = 0.02  # of the time, at most, goes into pictures of the curves
WISHES = {  # of Controls: the button, what it does, and what is said once it is pressed
    "stop": ("Stop after this step", "Ends the training", "stops after the step that runs now"),
    "save": ("Save now", "Writes a checkpoint", "a checkpoint follows the step that runs now"),
    "evaluate": ("Evaluate now", "On the validation split", "a validation follows this step"),
}


class Dashboard:
    """What a training has told so far, and its parts as HTML. Not thread-safe."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.line: dict[str, float] = {}  # the latest of a step
        self.step, self.total_steps = 0, 0
        self.alerts: list[tuple[int, Check]] = []
        self.alert_count = 0
        self.sample: Sequence[Mapping[str, Any]] = ()
        self._seconds = deque(maxlen=20)  # of the latest steps

    def add(self, update: Update) -> None:
        values = charts.numbers(update.line)
        self.step = int(values.get("step", self.step))
        values["step"], self.total_steps = self.step, update.total_steps
        self.lines.append(values)
        if "step_time" in values:
            self.line = values
            self._seconds.append(values["step_time"])
        self.alert_count += len(update.alerts)
        alerts = [*self.alerts, *((self.step, alert) for alert in update.alerts)]
        alerts.sort(key=lambda one: (one[1].state != "stop", -one[0]))
        self.alerts = alerts[:ALERTS]
        self.sample = update.completions or self.sample

    def header(self) -> str:
        """Step, progress, speed, time left, and memory."""
        parts = []
        if self._seconds:
            pace = sum(self._seconds) / len(self._seconds)
            left = (self.total_steps - self.step) * pace
            parts = [f"{pace:.3g} s a step"]
            parts.append(f"about {timedelta(seconds=round(left))} left" if left > 0 else "finished")
        for key, form in (("tokens_per_second", "{:,.0f} tokens/s"), ("memory_gib", "{:.2f} GiB")):
            parts += [form.format(self.line[key])] if key in self.line else []
        label = f"step {self.step} of {self.total_steps}"
        return (
            f"<div style='display:flex;gap:14px;align-items:center;flex-wrap:wrap'>"
            f"<b>{label}</b><progress aria-label='{label}' value='{self.step}' "
            f"max='{max(1, self.total_steps)}' style='flex:1;min-width:120px'></progress>"
            f"<span>{' · '.join(parts)}</span></div>"
        )

    def curves(self) -> str:
        """Every chart that has something to show, as one picture; "" before the first update."""
        return charts.image(self.lines) if self.lines else ""

    def alert_list(self) -> str:
        """Alerts, those that stop first, then the newest."""
        lines = "".join(
            f"<li style='border-left: 4px solid {EDGES[alert.state]}; padding-left: 8px'>"
            f"<b>{alert.state}, step {step}: {html.escape(alert.name)}</b> · "
            f"{html.escape(alert.evidence)}<br>→ {html.escape(alert.fix)} · "
            f"<a href='{REPOSITORY}/{section(alert.name)}' target='_blank' "
            f"style='color: inherit'>what to do</a></li>"
            for step, alert in self.alerts
        )
        more = self.alert_count - len(self.alerts)
        rest = f"<p>and {more} more, in train/health.jsonl</p>" if more else ""
        return f"<ul style='list-style:none;padding:0;line-height:1.5'>{lines}</ul>{rest}" * bool(
            lines
        )

    def completions(self) -> str:
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
        self.controls, self.page = controls, Dashboard()
        self._due = 0.0  # before then no other picture
        self.header, self.wishes = w.HTML(self.page.header()), w.HTML()
        self.alerts, self.curves, self.completions = w.HTML(), w.HTML(), w.HTML()
        self.buttons = {}
        for name, (label, tooltip, _) in WISHES.items():
            button = w.Button(description=label, tooltip=tooltip, layout=WIDE)
            self.buttons[name] = button
            self.on(partial(self._wish, name), button)
        row = w.HBox([*self.buttons.values(), self.wishes])
        parts = [self.alerts, self.curves, self.completions]
        self.children = [self.header, row, self.errors, *parts]
        self._show_wishes()

    def __call__(self, update: Update) -> None:
        """Take an update; pictures and completions follow at their own pace."""
        self.guard(partial(self._take, update))

    def _take(self, update: Update) -> None:
        self.page.add(update)
        self._show_wishes()
        self.header.value, self.alerts.value = self.page.header(), self.page.alert_list()
        last = self.page.step >= self.page.total_steps or self.controls.stop.is_set()
        began = time.monotonic()
        if began < self._due and not last:
            return
        # A picture takes a part of a second: the longer it took, the later the next one.
        self.completions.value, self.curves.value = self.page.completions(), self.page.curves()
        ended = time.monotonic()
        self._due = ended + (ended - began) / SHARE

    def _wish(self, name: str) -> None:
        getattr(self.controls, name).set()
        self._show_wishes()

    def _show_wishes(self) -> None:
        """A request stands until the training has taken it, and cannot be repeated before."""
        asked = [name for name in WISHES if getattr(self.controls, name).is_set()]
        said = "; ".join(WISHES[name][2] for name in asked)
        self.wishes.value = f"<span role='status'>{said}</span>"
        for name, button in self.buttons.items():
            button.disabled = name in asked
            # A click goes where the browser sends it. ipykernel 7.4 remembers the thread that drew
            # the button, which here is the one that is busy with the cell.
            if button.comm is not None:
                vars(button.comm).pop("_reply_subshell_id", None)
