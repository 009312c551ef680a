"""Provide the parts that the notebooks' widgets share: error messages and buttons.

Widgets contain no logic, and nothing that a later cell needs, so a notebook works without them.
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
    """Show the callbacks' exceptions in `errors`, with a collapsed traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = w.HTML()

    def __repr__(self) -> str:
        return f"{type(self).__name__}: run this notebook to use it"

    def guard(self, action: Callable[[], None], *_: Any) -> None:
        """Run the action; show an exception in `errors` and do not raise it."""
        self.errors.value = ""
        try:
            action()
        except Exception as error:
            message, trace = map(html.escape, (self.sentence(error), traceback.format_exc()))
            self.errors.value = (
                f"<div style='{ALERT}'><span role='alert'>{message}</span>"
                f"<details><summary>traceback</summary><pre>{trace}</pre></details></div>"
            )

    def sentence(self, error: BaseException) -> str:
        """Return the message that is shown for an exception."""
        return f"{type(error).__name__}: {error}"

    def on(self, action: Callable[[], None], *inputs: w.Widget) -> None:
        """Call the action whenever the value of one of the inputs changes."""
        for element in inputs:
            element.observe(partial(self.guard, action), "value")
            in_order(element)

    def button(self, label: str, tooltip: str, action: Callable[[], None]) -> w.Button:
        """Return a button that calls the action."""
        button = w.Button(description=label, tooltip=tooltip, layout=WIDE)
        button.on_click(partial(self.guard, action))
        in_order(button)
        return button


def in_order(element: w.Widget) -> None:
    """Handle the input's messages in the order in which the browser sends them.

    By default ipykernel 7.4 gives each message to the thread that last wrote to the element, so
    that a click overtakes the text typed before it, or waits until the cell has ended.
    """
    if element.comm is not None:
        element.comm._reply_subshell_for = None
