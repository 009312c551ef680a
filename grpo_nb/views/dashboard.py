"""A training as it runs, as HTML: progress, alerts, charts, and three completions."""

import html
import math
import random
import re
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_nb.runs import Check
from grpo_nb.training import Update
from grpo_nb.views import charts, sheet

ALERTS = 20  # shown
EDGES = {"stop": "#d33", "warning": "#c96f0a"}
NOT_REWARDS = {"question", "completion", "reward", "advantage"}
HANDBOOK = "https://github.com/grpo-nb/grpo_nb/blob/main/docs/troubleshooting.md"


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
            parts.append(f"about {_duration(left)} left" if left > 0 else "finished")
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
            f"{_link(alert.name)}</li>"
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
        head = ["", "prompt", "completion", *map(sheet.short, names), "total", "advantage"]
        lines = []
        for kind, one in {"best": ranked[-1], "worst": ranked[0], "random": other}.items():
            texts = [sheet.read(str(one[key]), None)[0] for key in ("question", "completion")]
            scores = [charts.shown(one.get(name), ".3g") for name in [*names, "reward"]]
            lines.append([kind, *texts, *scores, charts.shown(one.get("advantage"), "+.2f")])
        return sheet.Page(sheet.table(head, lines))


def _link(name: str) -> str:
    """To the alert's section of the handbook."""
    anchor = re.sub(r"[^a-z]+", "-", name.lower())
    return f"<a href='{HANDBOOK}#{anchor}' target='_blank' style='color: inherit'>what to do</a>"


def _duration(seconds: float) -> str:
    """
    >>> [_duration(s) for s in (9.4, 75, 5400)]
    ['9 s', '1 min 15 s', '1 h 30 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
