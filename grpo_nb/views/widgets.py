"""What the notebooks' widgets share: errors on the screen, buttons, controls.

Widgets hold no logic and nothing that a later cell needs: the notebook shows the same without.
"""

import html
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import ipywidgets as w

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
