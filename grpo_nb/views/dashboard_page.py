"""A training as it runs, as HTML: progress, charts, alerts, and three completions."""

import html
import math
import random
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from grpo_nb.runs import PROJECT_ROOT
from grpo_nb.training.control import Update
from grpo_nb.training.health import Alert
from grpo_nb.views import charts
from grpo_nb.views.sheet import STYLE, highlight, short

ALERTS, TEXT, LONGEST = 20, 300, 20_000  # alerts; characters at once, and on demand
EDGES = {"error": "#d33", "warning": "#c96f0a"}
NOT_REWARDS = {"question", "completion", "reward", "advantage"}


class Dashboard:
    """What a training has told so far, and its parts as HTML. Not thread-safe."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []
        self.keys: dict[str, None] = {}  # of all lines
        self.line, self.total_steps, self.step = {}, 0, 0
        self.alerts: list[Alert] = []
        self.alert_count = 0
        self.sample: Sequence[Mapping[str, Any]] = ()
        self._seconds = deque(maxlen=20)  # of the latest steps

    def add(self, update: Update) -> None:
        values = charts.numbers(update.line)
        self.step = int(values.get("step", self.step))
        values["step"], self.total_steps = self.step, update.total_steps
        self.lines.append(values)
        self.keys |= dict.fromkeys(values)
        if not any(key.startswith("eval/") for key in values):
            self.line = update.line
            self._seconds += [values["step_time"]] if "step_time" in values else []
        self.alert_count += len(update.alerts)
        alerts = [*self.alerts, *update.alerts]
        self.alerts = sorted(alerts, key=lambda a: (a.severity != "error", -a.step))[:ALERTS]
        self.sample = update.completions or self.sample

    def header(self) -> str:
        """Step, progress, speed, time left, and memory."""
        line, parts = charts.numbers(self.line), []
        if self._seconds:
            pace = sum(self._seconds) / len(self._seconds)
            parts.append(f"{pace:.3g} s a step")
            left = (self.total_steps - self.step) * pace
            parts.append(f"about {_duration(left)} left" if left > 0 else "finished")
        for key, form in (("tokens_per_second", "{:,.0f} tokens/s"), ("memory_gib", "{:.2f} GiB")):
            parts += [form.format(line[key])] if key in line else []
        stage = f" · {html.escape(str(self.line['stage']))}" if self.line.get("stage") else ""
        label = f"step {self.step} of {self.total_steps}"
        return (
            f"<div style='display:flex;gap:14px;align-items:center;flex-wrap:wrap'>"
            f"<b>{label}{stage}</b><progress aria-label='{label}' value='{self.step}' "
            f"max='{max(1, self.total_steps)}' style='flex:1;min-width:120px'></progress>"
            f"<span>{' · '.join(parts)}</span></div>"
        )

    def curves(self) -> str:
        """Every chart that has something to show, as one picture; "" before the first update."""
        return charts.image(self.lines) if self.lines else ""

    def legend(self) -> str:
        """How to read each chart; the rewards share one text."""
        texts: dict[str, list[str]] = {}
        for chart in self._charts:
            texts.setdefault(html.escape(chart.how), []).append(html.escape(chart.title))
        lines = (f"<li><b>{', '.join(titles)}</b>: {how}</li>" for how, titles in texts.items())
        return (
            f"<details><summary>How to read the charts</summary><ul>{''.join(lines)}</ul></details>"
        )

    @property
    def _charts(self) -> list[charts.Chart]:
        return charts.charts(self.keys)

    def alert_list(self) -> str:
        """Alerts, errors first, then the newest."""
        lines = "".join(
            f"<li style='border-left: 4px solid {EDGES[a.severity]}; padding-left: 8px'>"
            f"<b>{a.severity}, step {a.step}: {html.escape(a.rule)}</b> · "
            f"{html.escape(a.evidence)}<br>→ {html.escape(a.fix)} · {_link(a.see)}</li>"
            for a in self.alerts
        )
        more = self.alert_count - len(self.alerts)
        rest = f"<p>and {more} more, in train/health.jsonl</p>" if more else ""
        return (
            f"<ul style='list-style:none;padding:0;line-height:1.5'>{lines}</ul>{rest}"
            if lines
            else ""
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
        head = ["", "prompt", "completion", *map(short, names), "total", "advantage"]
        chosen = {"best": ranked[-1], "worst": ranked[0], "random": other}
        lines = [_row(kind, completion, names) for kind, completion in chosen.items()]
        cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        return f"{STYLE}<table class='sheet'><tr>{cells}</tr>{''.join(lines)}</table>"


@cache
def _link(see: str) -> str:
    """To a section of the handbook, where it is published."""
    about = tomllib.loads((PROJECT_ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    address = f"{about['project']['urls']['Repository']}/blob/main/{see}"
    return f"<a href='{address}' target='_blank' style='color: inherit'>{see}</a>"


def _row(kind: str, completion: Mapping[str, Any], names: Sequence[str]) -> str:
    scores = [charts.shown(completion.get(name), ".3g") for name in [*names, "reward"]]
    texts = [
        f"<div class='text'>{_folded(str(completion[k]))}</div>" for k in ("question", "completion")
    ]
    cells = [
        f"<span style='white-space:nowrap'>{kind}</span>",
        *texts,
        *scores,
        charts.shown(completion.get("advantage"), "+.2f"),
    ]
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _folded(text: str) -> str:
    """Its beginning, and the rest on demand."""
    start, rest = text[:TEXT], html.escape(text[TEXT:LONGEST], quote=False)
    if not rest:
        return highlight(start, None)
    cut = f" … {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
    return f"<details><summary>{highlight(start, None)}…</summary>{rest}{cut}</details>"


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
