"""Render frames as HTML tables with whole texts, and put completions side by side.

Colors are translucent, so that the tables are readable on light and dark pages.
"""

import html
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from PIL.Image import Image

SHOWN_CHARACTERS = 2_000
SHOWN_IMAGES = 3  # of a prompt: notebooks store them
IMAGE_SIDE, IMAGE_COLORS = 128, 64  # of a thumbnail: at most about 16 kB
WHOLE = 16  # a cell with at most this many characters, such as an interval, is never wrapped
# The last two keep notebooks from typesetting the $…$ of a completion.
CLASSES = ["sheet", "tex2jax_ignore", "mathjax_ignore"]
STYLE = f"<style>\n{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"


def show_tables() -> None:
    """Display every DataFrame of this notebook with `table`; outside a notebook, do nothing."""
    from IPython import get_ipython

    pd.set_option("display.width", 80, "display.max_columns", 20)  # of the text beside the HTML
    if shell := get_ipython():
        shell.display_formatter.formatters["text/html"].for_type(pd.DataFrame, table)


def table(frame: pd.DataFrame) -> str:
    """Render a frame as HTML, with left-aligned text and images; tags are shown as text."""
    heads = {name: html.escape(short(str(name))) for name in frame}
    options = {"index": False, "escape": False, "na_rep": "None", "border": 0, "classes": CLASSES}
    cells = [cell] * frame.shape[1]
    return STYLE + frame.rename(columns=heads).to_html(formatters=cells, **options)


def cell(value: Any) -> str:
    """Render a cell: a number, a text, or the images of a prompt.

    >>> cell(0.12345), cell("<b>")
    ('<div class=whole>0.123</div>', '<div class=whole>&lt;b&gt;</div>')
    """
    if isinstance(value, list) and value and hasattr(value[0], "thumbnail"):
        return thumbnails(value)
    text = f"{value:.3g}" if isinstance(value, float) else cut(str(value), SHOWN_CHARACTERS)
    kind = "whole" if len(text) <= WHOLE else "text"
    return f"<div class={kind}>{html.escape(text, quote=False)}</div>"


def completions(frame: pd.DataFrame) -> pd.DataFrame:
    """Put a few completions side by side: one column each, headed by the frame's index.

    Args:
        frame: One line per completion, with question, completion and any of: reference, answer,
            images, numeric or boolean columns, `<reward>/reason`.
    """
    names = ["images", "question", "reference", "completion", "answer"]
    names = [name for name in names if name in frame]
    names += [*frame.select_dtypes(["number", "bool"])]
    names += [name for name in frame if str(name).endswith("/reason") and frame[name].any()]
    heads = [short(name) for name in names]
    return frame[names].T.set_axis(heads).rename_axis("").reset_index()


def short(name: str) -> str:
    """Shorten a reward's name to a column head.

    >>> short("soft_format_reward")
    'soft format'
    """
    return name.removesuffix("_reward").replace("_", " ")


def thumbnails(images: "Sequence[Image]") -> str:
    """Render the first images of a prompt, small enough to be stored in a notebook."""
    tags = []
    for image in images[:SHOWN_IMAGES]:
        small, buffer = image.copy(), BytesIO()
        small.thumbnail((IMAGE_SIDE, IMAGE_SIDE))
        small.quantize(IMAGE_COLORS).save(buffer, "PNG")
        file = b64encode(buffer.getvalue()).decode()
        tags.append(f"<img alt='image' src='data:image/png;base64,{file}'> ")
    return "".join(tags)


def cut(text: str, characters: int) -> str:
    """Shorten a text to at most this number of characters."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
