"""Provide what the notebooks' widgets share.

Widgets contain nothing that a later cell needs, so a notebook works without them.
"""

import ipywidgets as w


def in_order(element: w.Widget) -> None:
    """Handle the input's messages in the order in which the browser sends them.

    By default ipykernel 7.4 gives each message to the thread that last wrote to the element, so
    that a click overtakes the text typed before it, or waits until the cell has ended.
    """
    if element.comm is not None:
        element.comm._reply_subshell_for = None
