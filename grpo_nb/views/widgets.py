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
TOLD = {
    "question": "prompt",
    "reference": "reference answer",
    "completion": "completion",
    "answer": "answer read",
}
WIDE = {"width": "auto"}
ALERT = "border-left: 4px solid #d33; padding-left: 8px; white-space: pre-wrap; line-height: 1.4"


class View(w.VBox):
    """A widget whose callbacks show their errors in `errors`: a sentence, the traceback folded."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = w.HTML()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: run this notebook to use it"

    def guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run it; what it raises is shown, and the caller goes on."""
        self.errors.value = ""
        try:
            action()
        except Exception as error:
            said, trace = map(html.escape, (self.sentence(error), traceback.format_exc()))
            self.errors.value = (
                f"<div style='{ALERT}'><span role='alert'>{said}</span>"
                f"<details><summary>traceback</summary><pre>{trace}</pre></details></div>"
            )

    def sentence(self, error: Exception) -> str:
        """What is said of an error."""
        return f"{type(error).__name__}: {error}"

    def on(self, action: Callable[[], None], *controls: w.Widget) -> None:
        """Call it when the value of a control changes."""
        for control in controls:
            control.observe(partial(self.guard, action), "value")
            _in_order(control)

    def button(self, label: str, tooltip: str, action: Callable[[], None]) -> w.Button:
        """A button that calls it."""
        button = w.Button(description=label, tooltip=tooltip, layout=WIDE)
        button.on_click(partial(self.guard, action))
        _in_order(button)
        return button

    def code_box(self, label: str, hint: str, rows: int) -> w.Textarea:
        """A box to write in, whose text is sent as a whole when a button takes the focus.

        A keystroke that waits for a busy kernel would arrive after the click.
        """
        look = {"rows": rows, "placeholder": hint, "layout": WIDE, "continuous_update": False}
        box = w.Textarea(description=label, **look)
        box.add_class("code-box")
        _in_order(box)
        return box

    def alone(self, action: Callable[[], None], *buttons: w.Button) -> None:
        """Run it while these buttons take no click, which would overtake what is typed meanwhile.

        A front end holds a control's change back while the kernel works on the one before.
        """
        for button in buttons:
            button.disabled = True
        try:
            action()
        finally:
            for button in buttons:
                button.disabled = False


def _in_order(control: w.Widget) -> None:
    """Let its messages be handled where the browser sends them: in order, though a cell runs.

    ipykernel 7.4 would give each to the thread that wrote to the control last, so that a click
    overtakes what was typed before it, or waits for a cell to end.
    """
    if control.comm is not None:
        control.comm._reply_subshell_for = None


class CompletionBrowser(View):
    """Baseline rollouts, or completions of a training or an evaluation: filtered, sorted, compared.

    Args:
        frame: question, completion and any of: reference, answer, `<reward>/reason`, step,
            truncated, correct; they can be filtered by all columns, as `DataFrame.query` does, and
            sorted by each column of numbers.
    """

    def __init__(self, frame: pd.DataFrame) -> None:
        super().__init__()
        self.frame = frame.reset_index(drop=True)
        self.numbers = [c for c in frame.select_dtypes("number") if c != "step"]
        hint = f"such as: {self.numbers[0]} > 0" + " and not truncated" * ("truncated" in frame)
        self.query = w.Text(description="Filter", placeholder=hint, layout={"width": "32em"})
        self.query.continuous_update = False
        self.by = w.Dropdown(options=self.numbers, description="Score")
        self.descending = w.Checkbox(value=True, description="highest first", indent=False)
        self.count, self.shown = w.HTML(), w.HTML()
        self.chosen = w.SelectMultiple(description="Compare", rows=8, layout=WIDE)
        controls = w.HBox([self.query, self.by, self.descending])
        self.children = [controls, self.errors, self.count, self.chosen, self.shown]
        self.on(self._list, self.query, self.by, self.descending)
        self.on(self._show, self.chosen)
        self._list()

    def sentence(self, error: Exception) -> str:
        """What is wrong with the filter, with what it may name."""
        return f"the filter {self.query.value!r}: {error}; columns: {', '.join(self.frame)}"

    @property
    def found(self) -> pd.DataFrame:
        """The lines that pass the filter, sorted."""
        query, descending = self.query.value.strip(), self.descending.value
        lines = self.frame.query(query, engine="python") if query else self.frame
        return lines.sort_values(self.by.value, ascending=not descending, kind="stable")

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
        """The selected completions side by side: a column each, a line for all that is known."""
        chosen = self.frame.loc[list(self.chosen.value)].to_dict("records")
        told = {name: label for name, label in TOLD.items() if name in self.frame}
        lines = [[label, *(_cell(one, name) for one in chosen)] for name, label in told.items()]
        for name in self.numbers:
            scores = [tables.score(one[name], one.get(f"{name}/reason", "")) for one in chosen]
            lines.append([html.escape(tables.short(name)), *scores])
        head = ["", *(f"completion {number + 1}" for number in range(len(chosen)))]
        none = "no completion passes this filter"
        self.shown.value = tables.Page(tables.markup(head, lines)) if chosen else none


def _cell(line: dict[str, Any], name: str) -> str:
    if name == "completion":
        answer = line.get("answer")
        return tables.read(line[name], answer if isinstance(answer, str) else None)[0]
    return html.escape(str(line[name]))


def _label(line: dict[str, Any], by: str) -> str:
    step = f"step {line['step']} · " if "step" in line else ""
    return f"{step}{line[by]:.3g} · {line['question'][:40]} → {line['completion'][:60]!r}"
