"""Show training as it runs: the numbers go to the browser at each step, and are drawn there."""

import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any

import anywidget
import traitlets as t

from grpo_nb.checks import Update
from grpo_nb.stats import wilson
from grpo_nb.views import charts
from grpo_nb.views.tables import cut

EVERY = 1.0  # seconds between what is sent where steps are faster
MOST = {"rows": 1000, "groups": 48}  # of more, every second one is dropped
SOLVED = 0.98  # share of right answers in validation from which more training is a waste of time
START = 10  # at least so many steps are in the mean of the training's beginning
SHOWN = 8  # completions of a group
CHARACTERS = 1_500  # of a completion, or of a question
TEXTS = {"question", "completion", "reward", "advantage", "images"}
Line = Mapping[str, float]


def _source(suffix: str) -> str:
    """Return the text of uPlot's file with this suffix, followed by the text of our own."""
    places = [Path(__file__).with_name(f"{name}.{suffix}") for name in ("uplot", "dashboard")]
    return "\n".join(place.read_text(encoding="utf-8") for place in places)


class TrainingDashboard(anywidget.AnyWidget):
    """Show each `Update` of the trainer.

    Args:
        interrupt: A text that says what the notebook's interrupt button does.
    """

    _esm, _css = _source("js"), _source("css")
    spec = t.List([chart._asdict() for chart in (charts.TOTAL, *charts.OTHERS)]).tag(sync=True)
    interrupt = t.Unicode().tag(sync=True)
    now = t.Dict().tag(sync=True)  # sentence, phase, step, and so on
    alerts = t.List().tag(sync=True)
    base = t.List().tag(sync=True)  # of `before_training`
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
        """Take an update, and send it to the browser now or together with a later one."""
        with self._guarded():
            line = charts.finite(update.line)
            if "eval/accuracy" in line:  # which says it all
                line.pop("eval/reward", None)
            self.step, self.total_steps = int(line.get("step", self.step)), update.total_steps
            self.lines.append(line | {"step": self.step})
            self.is_over = self.step >= self.total_steps
            self._texts["rows"].append(self._row(self.lines[-1]))
            if update.completions:
                group = one_group(self.step, update.completions)
                self._texts["groups"].append(json.dumps(group))
            for name, texts in self._texts.items():
                if len(texts) > MOST[name]:
                    del texts[1:-1:2]
            for name, state, evidence, fix in update.alerts:
                text = f"{name}, {evidence} → {fix}"
                alert = {"step": self.step, "state": state, "text": text, "evidence": evidence}
                self.alerts = [*self.alerts, alert]
            self.base = self.base or before_training(self.lines, self._eval_rows)
            if sends:
                self._publish(self.phase, is_short=not (self.is_over or update.alerts))

    def begin(self, updates: Iterable[Update], total_steps: int, eval_rows: int = 0) -> None:
        """Show a training that begins, or that goes on after these updates.

        Args:
            updates: The updates of the steps that are already trained.
            total_steps: The number of steps of the training.
            eval_rows: The number of validation prompts; 0 if it is unknown.
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
        """Show that training, or its cell, has ended."""
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
        """Return a line's values as JSON, in the order of `names`; append new keys to `names`."""
        if new := [key for key in line if key not in self.names]:
            self.names = [*self.names, *new]
        values = [line.get(key) for key in self.names]
        return json.dumps([v if v is None else float(f"{v:.5g}") for v in values])

    def _publish(self, phase: str, is_short: bool = False) -> None:
        """Send what is new, unless the phase is short and something was sent just now."""
        self.phase = phase
        if is_short and time.monotonic() < self._sent + EVERY:
            return
        facts = (self.base, self.total_steps, self.correct)
        gravity, text = sentence(self.lines, self.alerts, *facts)
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
        pace = fmean(seconds)
        left = timedelta(seconds=round((self.total_steps - self.step) * pace))
        return f"{pace:.3g} s per step" + ("" if self.is_over else f" · about {left} left")


def before_training(lines: Sequence[Line], prompts: int) -> list[float]:
    """Return the first validation and its 95 % interval; [] if the first step had none.

    Args:
        lines: The lines so far.
        prompts: The number of validation prompts; 0 if it is unknown, which omits the interval.
    """
    first = lines[0] if lines else {}
    if (share := first.get("eval/accuracy")) is not None:
        return [share, *wilson(round(share * prompts), prompts)] if prompts else [share]
    return [first["eval/reward"]] if "eval/reward" in first else []


def sentence(
    lines: Sequence[Line],
    alerts: Sequence[Mapping[str, Any]],
    base: Sequence[float],
    total_steps: int,
    correct: str = "",
) -> tuple[str, str]:
    """Return the gravity ("stop", "warning", "good" or "") and the sentence about a training.

    Args:
        lines: Finite numbers of the lines of metrics.jsonl.
        alerts: The alerts so far, with "state" and "text".
        base: The result of `before_training`.
        total_steps: The number of steps of the training.
        correct: The name of the reward that says what is right; "" if it is not known.

    >>> line = {"eval/accuracy": 1.0}
    >>> sentence([{"step": 25, **line}, {"step": 50, **line}], [], [], 99)
    ('good', 'solved: the validation is at 100% since step 25')
    """
    newest = {alert["state"]: alert["text"] for alert in alerts}
    if "stop" in newest:
        return "stop", newest["stop"]
    shares = [(line["step"], line["eval/accuracy"]) for line in lines if "eval/accuracy" in line]
    solved = list(takewhile(lambda pair: pair[1] >= SOLVED, reversed(shares)))
    if solved and solved[0][0]:
        since = f"solved: the validation is at {solved[0][1]:.0%} since step {solved[-1][0]}"
        return "good", since
    if newest:
        return "warning", next(reversed(newest.values()))
    if len(base) == 3 and len(shares) > 1:
        (before, low, high), (step, share) = base, shares[-1]
        figures = f"validation {before:.0%} before training, {share:.0%} at step {step}"
        if share > high:
            return "good", f"it learns: {figures}"
        if share < low:
            return "warning", f"it gets worse: {figures}"
    return "", _means(lines, total_steps, correct)


def _means(lines: Sequence[Line], total_steps: int, correct: str) -> str:
    """Return first and last means of the total and of the reward that says what is right."""
    # The first part of the training stays the same while it goes on.
    steps, part = [line for line in lines if "reward" in line], max(START, total_steps // 10)
    if len(steps) < 2 * part:
        return "too early to tell"
    texts = []
    for name, key in (("the reward", "reward"), (f"`{correct}`", f"rewards/{correct}/mean")):
        ends = [[line[key] for line in of if key in line] for of in (steps[:part], steps[-part:])]
        if all(ends):
            texts.append(f"{name} {fmean(ends[0]):.3g} → {fmean(ends[1]):.3g}")
    return f"{', '.join(texts)} (means of the first and the last {part} steps)"


def one_group(step: int, completions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one prompt of a step: the one whose best and worst totals differ most.

    Args:
        step: The step.
        completions: As in `Update`.

    Returns:
        step, question, the number of completions, and at most SHOWN of them, best first; each has
        text, total, advantage, and the scores of the rewards.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for one in sorted(completions, key=lambda one: -(_number(one["reward"]) or 0.0)):
        groups.setdefault(str(one["question"]), []).append(one)
    totals = {key: [_number(one["reward"]) or 0.0 for one in g] for key, g in groups.items()}
    group = groups[max(groups, key=lambda key: totals[key][0] - totals[key][-1])]
    half = SHOWN // 2
    some = group if len(group) <= SHOWN else [*group[:half], *group[-half:]]
    return {
        **{"step": step, "question": cut(str(group[0]["question"]), CHARACTERS)},
        **{"count": len(group), "completions": list(map(_shown, some))},
    }


def _shown(one: Mapping[str, Any]) -> dict[str, Any]:
    scores = {
        name: _number(value)
        for name, value in one.items()
        if name not in TEXTS and (value is None or isinstance(value, int | float))
    }
    total, advantage = _number(one["reward"]), _number(one.get("advantage"))
    text = cut(str(one["completion"]), CHARACTERS)
    return {"text": text, "total": total, "advantage": advantage, "scores": scores}


def _number(value: Any) -> float | None:
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None
