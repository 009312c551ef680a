"""Render HTML tables of frames, and of completions with answers, scores and advantages.

Colors are translucent, so that the tables are readable on light and dark pages.
"""

import html
import math
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from grpo_nb import refusals
from grpo_nb.rewards import RewardSet

if TYPE_CHECKING:
    from PIL.Image import Image

MARKS = re.compile(r"&lt;/?\w+&gt;|```\w*|####|\\boxed")  # tags and marks of all answer forms
SHOWN_CHARACTERS = 2_000
SHOWN_IMAGES = 3  # images per prompt, and completions per table with images: notebooks store them
IMAGE_SIDE, IMAGE_COLORS = 128, 64  # of a thumbnail: at most about 16 kB
WHOLE = 16  # a cell with at most this many characters, such as an interval, is never wrapped
VERBATIM = "tex2jax_ignore mathjax_ignore"  # CSS classes that keep notebooks from typesetting $…$
STYLE = f"<style>\n{Path(__file__).with_name('style.css').read_text(encoding='utf-8')}</style>"


class Page(str):
    """Hold HTML that a notebook renders, and the plain text that is printed elsewhere.

    Dollar signs and formulas that a model wrote are not typeset.
    """

    def __new__(cls, markup: str, plain: str = "") -> "Page":
        page = super().__new__(cls, f"<div class='{VERBATIM}'>{markup}</div>")
        page.plain = plain
        return page

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return self.plain


def show_tables() -> None:
    """Display every DataFrame of this notebook with `table`, and our refusals in one line.

    Outside a notebook, nothing is done.
    """
    from IPython import get_ipython

    refusals.in_one_line()
    if shell := get_ipython():
        formatters = shell.display_formatter.formatters
        formatters["text/html"].for_type(pd.DataFrame, table)
        formatters["text/plain"].for_type(
            pd.DataFrame, lambda frame, printer, _: printer.text(frame.to_string(index=False))
        )


def table(frame: pd.DataFrame) -> Page:
    """Render a frame with left-aligned text that is never truncated; tags are shown as text."""
    lines = [list(map(cell, line)) for line in frame.itertuples(index=False, name=None)]
    return Page(markup(map(short, map(str, frame)), lines), frame.to_string(index=False))


def cell(value: Any, reason: str = "") -> str:
    """Render a cell; below a score, which may be None, show its reason if there is one."""
    if not (isinstance(value, float) or value is None):
        return html.escape(str(value))
    text = "None" if value is None or not math.isfinite(value) else f"{value:.3g}"
    return f"{text}<small>{html.escape(cut(reason, 120))}</small>" if reason else text


def markup(head: Iterable[str], lines: Iterable[Sequence[str]], caption: str = "") -> str:
    """Render an HTML table.

    Args:
        head: Column heads, as plain text.
        lines: Cells of each row of the table, as HTML.
        caption: The caption, as HTML.
    """
    rows = [("th", map(html.escape, head)), *(("td", line) for line in lines)]
    content = "".join(f"<tr>{''.join(_tagged(tag, text) for text in line)}" for tag, line in rows)
    return f"{STYLE}<table class='sheet'><caption>{caption}</caption>{content}</table>"


def _tagged(tag: str, text: str) -> str:
    return f"<{tag} class=whole>{text}</{tag}>" if len(text) <= WHOLE else f"<{tag}>{text}</{tag}>"


def score_sheet(group: pd.DataFrame, preset: RewardSet) -> Page:
    """Render the completions of one group with their scores, and the images of the prompt.

    Args:
        group: One prompt's lines of the table from `Bench.table`, optionally with "images".
        preset: The rewards, with names and weights.
    """
    first, weights = group.iloc[0], dict(zip(preset.names, preset.reward_weights, strict=True))
    names = ["completion", "answer", *weights, "total", "advantage"]
    head = [f"{short(name)} × {weights[name]:g}" if name in weights else name for name in names]
    signal = "" if first["signal"] else "<b>zero advantage: nothing is learnt from this group</b> "
    caption = (
        f"{thumbnails(first.get('images', ()))}<b>{html.escape(first['question'])}</b>\n"
        f"reference answer {html.escape(str(first['reference']))} · "
        f"group mean {first['mean']:.3f}, std {first['std']:.3f} {signal}"
    )
    lines = [[str(number), *line] for number, line in enumerate(_cells(group, names), 1)]
    names.remove("answer")
    return Page(markup(["", *head], lines, caption), group[names].to_string(index=False))


def completions(frame: pd.DataFrame) -> Page:
    """Render a few completions side by side, one column each.

    Args:
        frame: One line per completion, with question, completion and any of: reference, answer,
            images, numeric or boolean columns, `<reward>/reason`. Its index gives the column
            heads, and `frame.attrs["note"]` a caption.
    """
    note, texts = frame.attrs.get("note", ""), ("question", "reference", "completion", "answer")
    texts = [name for name in ("images", *texts) if name in frame]
    names = [*texts, *frame.select_dtypes(["number", "bool"])]
    columns = zip(map(short, names), *_cells(frame, names), strict=True)
    sheet = markup(["", *map(str, frame.index)], columns, html.escape(note))
    printed = frame[[name for name in names if name != "images"]].T.to_string()
    return Page(sheet if len(frame) else "no such completion", f"{note}\n{printed}".lstrip())


def short(name: str) -> str:
    """Shorten a reward's name to a column head.

    >>> short("soft_format_reward")
    'soft format'
    """
    return name.removesuffix("_reward").replace("_", " ")


def _cells(frame: pd.DataFrame, names: Sequence[str]) -> list[list[str]]:
    """Render the cells of each completion: its texts, its answer, and its scores with reasons."""
    lines = []
    for number, record in enumerate(frame.to_dict("records")):
        answer = record.get("answer") if isinstance(record.get("answer"), str) else None
        texts = {
            "images": thumbnails(record.get("images", ()) if number < SHOWN_IMAGES else ()),
            "question": text(str(record.get("question"))),
            "completion": text(str(record["completion"]), answer),
            "answer": "<i>none</i>" if answer is None else html.escape(cut(answer, 80)),
        }
        rest = {n: cell(record[n], record.get(f"{n}/reason", "")) for n in names if n not in texts}
        lines.append([(texts | rest)[name] for name in names])
    return lines


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
    """Shorten a text to so many characters."""
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def text(content: str, answer: str | None = None) -> str:
    """Render a long text as a cell."""
    return f"<div class='text'>{highlight(content, answer)}</div>"


def highlight(text: str, answer: str | None) -> str:
    """Render a completion with the extracted answer marked and tags dimmed.

    >>> highlight("<answer>4</answer>", "4")
    "<span class='tag'>&lt;answer&gt;</span><mark>4</mark><span class='tag'>&lt;/answer&gt;</span>"
    """
    text = cut(text, SHOWN_CHARACTERS)
    # The answer stands before the last closing tag (`</think>` does not count), or else anywhere.
    end = max((tag.start() for tag in re.finditer(r"</(?!think>)", text)), default=len(text))
    end = end if (answer or "") in text[:end] else len(text)
    before, mark, after = text[:end].rpartition(answer or "\0")
    mark = f"<mark>{html.escape(mark, quote=False)}</mark>" if mark else ""
    return _dim(before) + mark + _dim(after + text[end:])


def _dim(text: str) -> str:
    return MARKS.sub(r"<span class='tag'>\g<0></span>", html.escape(text, quote=False))
