"""The completion browser: filter and sort completions, and lay two side by side."""

import difflib
import html
import re
from functools import partial
from typing import Any

import ipywidgets as w
import pandas as pd

from grpo_nb.views.sheet import verbatim

SHOWN = 200  # lines of the list
EITHER = {"any": None, "yes": True, "no": False}
DIFF_STYLE = """<style>
.diff { display: flex; gap: 16px; line-height: 1.4; }
.diff div { flex: 1; white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace; }
.diff ins { background: rgba(60, 160, 90, .35); text-decoration: none; }
.diff del { background: rgba(200, 70, 60, .35); text-decoration: none; }
</style>"""


class CompletionBrowser(w.VBox):
    """Completions of the pilot, of training or of an evaluation.

    Args:
        frame: question, completion and any of: step, truncated, correct; all columns of
            numbers can be filtered by and sorted by.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        self.frame = frame.reset_index(drop=True)
        numbers = [c for c in frame.select_dtypes("number") if c != "step"]
        wide, apart = w.Layout(width="auto"), w.Layout(width="auto", margin="0 24px 0 0")
        style = w.ToggleButtonsStyle(button_width="4em")
        self.by = w.Dropdown(options=numbers, description="Score")
        self.range = w.FloatRangeSlider(description="between", step=0.01)
        self.descending = w.Checkbox(value=True, description="highest first", indent=False)
        self.flags = {
            name: w.ToggleButtons(options=EITHER, description=name, style=style, layout=apart)
            for name in ("correct", "truncated")
            if name in frame
        }
        # Of one step alone there is nothing to choose, and the slider has no range then.
        self.has_steps = "step" in frame and frame["step"].nunique() > 1
        self.step = w.SelectionRangeSlider(
            options=sorted(frame["step"].unique()) if self.has_steps else [0], description="Steps"
        )
        self.step.index = (0, len(self.step.options) - 1)
        self.count = w.HTML()
        self.left = w.Select(description="Left", rows=8, layout=wide)
        self.right = w.Select(description="Right", rows=8, layout=wide)
        self.diff = w.HTML()
        controls = [self.by, self.range, self.descending]
        children = [w.HBox(controls), w.HBox([*self.flags.values()]), self.count]
        children += [self.step] if self.has_steps else []
        super().__init__(children=[*children, self.left, self.right, self.diff])
        self.by.observe(partial(self._set_range), "value")
        for control in (self.range, self.descending, self.step, *self.flags.values()):
            control.observe(partial(self._list), "value")
        for select in (self.left, self.right):
            select.observe(partial(self._compare), "value")
        self._set_range()

    def __repr__(self) -> str:
        return "The completion browser: run this notebook to use it"

    @property
    def chosen(self) -> pd.DataFrame:
        """The lines that pass the filters, sorted."""
        score = self.frame[self.by.value]
        low, high = self.range.value
        keep = score.between(low, high) | score.isna()
        for name, control in self.flags.items():
            if control.value is not None:
                keep &= self.frame[name].astype(bool) == control.value
        if self.has_steps:
            keep &= self.frame["step"].between(*self.step.value)
        lines = self.frame[keep]
        return lines.sort_values(self.by.value, ascending=not self.descending.value, kind="stable")

    def _set_range(self, *_: Any) -> None:
        score = self.frame[self.by.value]
        low, high = float(score.min()), float(score.max())
        self.range.min, self.range.max = min(low, self.range.min), max(high, self.range.max)
        self.range.value = (low, high)
        self.range.min, self.range.max = low, high
        self._list()

    def _list(self, *_: Any) -> None:
        lines = self.chosen
        self.count.value = f"{len(lines)} of {len(self.frame)} completions"
        options = [
            (_label(line, self.by.value), number)
            for number, line in zip(lines.index, lines.to_dict("records"), strict=True)
        ][:SHOWN]
        self.left.options = self.right.options = options
        if options:
            self.left.value = options[0][1]
            self.right.value = options[min(1, len(options) - 1)][1]
        self._compare()

    def _compare(self, *_: Any) -> None:
        numbers = [self.left.value, self.right.value]
        if None in numbers:
            self.diff.value = "no completion passes these filters"
            return
        self.diff.value = side_by_side(*self.frame.loc[numbers, "completion"])


def _label(line: dict[str, Any], by: str) -> str:
    step = f"step {line['step']} · " if "step" in line else ""
    return f"{step}{line[by]:.3g} · {line['question'][:40]} → {line['completion'][:60]!r}"


def side_by_side(left: str, right: str) -> str:
    """Two texts as HTML columns, what one lacks marked in the other.

    >>> "<del>4</del>" in side_by_side("2+2= 4", "2+2= 5")
    True
    """
    words = [re.findall(r"\s+|\w+|[^\w\s]", text[:5_000]) for text in (left, right)]
    sides: list[list[str]] = [[], []]
    for kind, a, b, c, d in difflib.SequenceMatcher(None, *words, autojunk=False).get_opcodes():
        for side, tag, part in ((0, "del", words[0][a:b]), (1, "ins", words[1][c:d])):
            text = html.escape("".join(part), quote=False)
            sides[side].append(text if kind == "equal" or not text else f"<{tag}>{text}</{tag}>")
    columns = "".join(f"<div>{''.join(side)}</div>" for side in sides)
    return verbatim(f"{DIFF_STYLE}<div class='diff'>{columns}</div>")
