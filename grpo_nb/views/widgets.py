"""What the notebooks' widgets share, and the browser of completions.

Widgets hold no logic and nothing that a later cell needs: the notebook shows the same without.
"""

import html
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb.views import tables

SHOWN = 200  # lines of the browser's list
EITHER = {"any": None, "yes": True, "no": False}
WIDE = {"width": "auto"}


class View(w.VBox):
    """A widget whose callbacks show their errors, with the traceback, in `errors`."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = w.HTML()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: run this notebook to use it"

    def guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run it; what it raises is shown, and the caller goes on."""
        try:
            action()
            self.errors.value = ""
        except Exception:
            text = html.escape(traceback.format_exc())
            look = "border-left: 4px solid #d33; padding-left: 8px; white-space: pre-wrap"
            self.errors.value = f"<pre role='alert' style='{look}'>{text}</pre>"

    def on(self, action: Callable[[], None], *controls: w.Widget) -> None:
        """Call it when a control changes, or a button is clicked."""
        for control in controls:
            if isinstance(control, w.Button):
                control.on_click(partial(self.guard, action))
            else:
                control.observe(partial(self.guard, action), "value")


class CompletionBrowser(View):
    """Baseline rollouts, or completions of a training or an evaluation: filtered, sorted, compared.

    Args:
        frame: question, completion and any of: step, truncated, correct; they can be sorted by
            each column of numbers.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__()
        self.frame = frame.reset_index(drop=True)
        self.numbers = [c for c in frame.select_dtypes("number") if c != "step"]
        self.by = w.Dropdown(options=self.numbers, description="Score")
        self.descending = w.Checkbox(value=True, description="highest first", indent=False)
        self.flags = {
            name: w.Dropdown(options=EITHER, description=name)
            for name in ("correct", "truncated")
            if name in frame
        }
        # Of one step alone there is nothing to choose, and the slider has no range then.
        steps = sorted(frame["step"].unique()) if "step" in frame else [0]
        self.step = w.SelectionRangeSlider(options=steps, description="Steps")
        self.step.index = (0, len(steps) - 1)
        self.count, self.shown = w.HTML(), w.HTML()
        self.chosen = w.SelectMultiple(description="Compare", rows=8, layout=WIDE)
        self.children = [
            w.HBox([self.by, self.descending, *self.flags.values()]),
            *([self.step] if len(steps) > 1 else []),
            *(self.count, self.chosen, self.errors, self.shown),
        ]
        self.on(self._list, self.by, self.descending, self.step, *self.flags.values())
        self.on(self._show, self.chosen)
        self._list()

    @property
    def found(self) -> pd.DataFrame:
        """The lines that pass the filters, sorted."""
        keep = pd.Series(True, index=self.frame.index)
        for name, control in self.flags.items():
            if control.value is not None:
                keep &= self.frame[name].astype(bool) == control.value
        if len(self.step.options) > 1:
            keep &= self.frame["step"].between(*self.step.value)
        descending = self.descending.value
        return self.frame[keep].sort_values(self.by.value, ascending=not descending, kind="stable")

    def _list(self) -> None:
        lines = self.found
        self.count.value = f"{len(lines)} of {len(self.frame)} completions"
        self.chosen.options = [
            (_label(line, self.by.value), number)
            for number, line in zip(lines.index, lines.to_dict("records"), strict=True)
        ][:SHOWN]
        self.chosen.value = [number for _, number in self.chosen.options[:2]]
        self._show()

    def _show(self) -> None:
        head = ["question", "completion", *map(tables.short, self.numbers)]
        lines = [
            [html.escape(str(line["question"])), tables.read(line["completion"], None)[0]]
            + [tables.score(line[name]) for name in self.numbers]
            for line in self.frame.loc[list(self.chosen.value)].to_dict("records")
        ]
        none = "no completion passes these filters"
        self.shown.value = tables.Page(tables.markup(head, lines)) if lines else none


def _label(line: dict[str, Any], by: str) -> str:
    step = f"step {line['step']} · " if "step" in line else ""
    return f"{step}{line[by]:.3g} · {line['question'][:40]} → {line['completion'][:60]!r}"
