"""A group's score sheet as HTML: completions with what was read in them, scores, advantages.

Colors are translucent, so that it reads on a light and on a dark page.
"""

import html
import math
import re
from collections.abc import Sequence

import pandas as pd

from grpo_nb.rewards import RewardSet
from grpo_nb.rewards.prompts import ANSWER, REASONING

HUES = (212, 32, 145, 282, 350, 180, 60, 100)  # of the rewards, in order
MARKS = re.compile(rf"</?(?:{REASONING}|{ANSWER}|think)>|```\w*|####|\\boxed")
SHOWN_CHARACTERS = 2_000
VERBATIM = "tex2jax_ignore mathjax_ignore"  # classes in which no notebook typesets `$…$`
BAR_PIXELS = 110  # of the completion with the largest contributions
STYLE = """<style>
.sheet { border-collapse: collapse; font-size: 13px; line-height: 1.35; }
.sheet th, .sheet td { text-align: left; vertical-align: top; padding: 4px 6px;
  border-bottom: 1px solid rgba(128, 128, 128, .35); overflow-wrap: anywhere; min-width: 3em; }
.sheet th:first-child, .sheet td:first-child { min-width: 1.2em; }
.sheet .text { white-space: pre-wrap; min-width: 12em; font-family: monospace; }
.sheet th { overflow-wrap: normal; font-size: 12px; }
.sheet .bars { white-space: nowrap; min-width: 110px; }
.sheet .tag { opacity: .55; }
.sheet mark { background: rgba(255, 200, 0, .45); color: inherit; }
.sheet small { display: block; opacity: .75; max-width: 14em; }
.sheet .bar { display: inline-block; height: 9px; }
.sheet .dot { display: block; height: 4px; margin-bottom: 3px; }
.sheet caption { text-align: left; padding: 6px 8px; white-space: pre-wrap; }
.sheet .chosen td { background: rgba(128, 128, 128, .14); }
.widget-html-content:has(.sheet) { overflow-x: auto; }
</style>"""


def verbatim(markup: str) -> str:
    """HTML in which a price or a formula that a model wrote stays the text that it wrote."""
    return f"<div class='{VERBATIM}'>{markup}</div>"


class Page(str):
    """HTML that a notebook shows, and that reads as its plain text elsewhere."""

    def __new__(cls, markup: str, plain: str) -> "Page":
        page = super().__new__(cls, verbatim(markup))
        page.plain = plain
        return page

    def _repr_html_(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return self.plain


def score_sheet(group: pd.DataFrame, preset: RewardSet, chosen: int | None = None) -> Page:
    """The lines of one group, as `Bench.table` gives them.

    Args:
        group: Score table of one prompt's completions.
        preset: Names and weights of the rewards.
        chosen: Number of the completion that is marked.
    """
    names, first = preset.names, group.iloc[0]
    head = ["", "completion", "answer"]
    head += [
        _head(i, n, w) for i, (n, w) in enumerate(zip(names, preset.reward_weights, strict=True))
    ]
    head += ["contributions", "total", "advantage"]
    signal = "" if first["signal"] else "<b>no signal: nothing is learnt from this group</b> "
    caption = (
        f"<b>{html.escape(first['question'])}</b>\ngold {html.escape(str(first['gold']))} · "
        f"group mean {first['mean']:.3f}, std {first['std']:.3f} {signal}"
    )
    widths = (group[names] * preset.reward_weights).abs().sum(axis=1).max()
    scale = BAR_PIXELS / widths if widths > 0 else 0
    lines = [
        _line(number, line, preset, scale, number == chosen)
        for number, line in enumerate(group.to_dict("records"))
    ]
    markup = (
        f"{STYLE}<table class='sheet'><caption>{caption}</caption>"
        f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>{''.join(lines)}</table>"
    )
    return Page(markup, group[["completion", *names, "total", "advantage"]].to_string(index=False))


def short(name: str) -> str:
    """A reward's name as a column head.

    >>> short("soft_xml_format_reward")
    'soft xml format'
    """
    return name.removesuffix("_reward").replace("_", " ")


def _head(number: int, name: str, weight: float) -> str:
    return f"{_dot(number)}{html.escape(short(name))}<small>× {weight:g}</small>"


def _dot(number: int) -> str:
    return f"<span class='dot' style='background:{_color(number)}'></span>"


def _color(number: int) -> str:
    return f"hsl({HUES[number % len(HUES)]} 60% 50%)"


def _line(number: int, line: dict, preset: RewardSet, scale: float, chosen: bool) -> str:
    scored = zip(preset.names, preset.reward_weights, strict=True)
    bars = [
        f"<span class='bar' title='{html.escape(short(name))}' style='width:"
        f"{abs(line[name] * weight) * scale:.0f}px;background:{_color(i)};"
        f"{'opacity:.35;' if line[name] * weight < 0 else ''}'></span>"
        for i, (name, weight) in enumerate(scored)
        if math.isfinite(line[name])
    ]
    reasons = [(line[name], line[f"{name}/reason"]) for name in preset.names]
    answer = line["answer"] if isinstance(line["answer"], str) else None  # a frame keeps NaN
    cells = [
        str(number + 1),
        f"<div class='text'>{highlight(line['completion'], answer)}</div>",
        "<i>none</i>" if answer is None else html.escape(_cut(answer, 80)),
        *(
            f"{_number(score)}<small>{html.escape(_cut(why, 120))}</small>"
            for score, why in reasons
        ),
        f"<div class='bars'>{''.join(bars)}</div>",
        _number(line["total"]),
        _advantage(line["advantage"]),
    ]
    mark = " class='chosen'" if chosen else ""
    return f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _number(value: float) -> str:
    return "None" if math.isnan(value) else f"{value:.3g}"


def _advantage(value: float) -> str:
    hue, width = (145, value) if value >= 0 else (12, -value)
    width = 0 if math.isnan(value) else min(60, 24 * width)
    look = f"width:{width:.0f}px;background:hsl({hue} 45% 55%)"
    return f"{value:+.2f} <span class='bar' style='{look}'></span>"


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"


def highlight(text: str, answer: str | None) -> str:
    """The completion as HTML: what was read as its answer is marked, tags are dimmed.

    >>> highlight("<answer>4</answer>", "4")
    "<span class='tag'>&lt;answer&gt;</span><mark>4</mark><span class='tag'>&lt;/answer&gt;</span>"
    """
    text = _cut(text, SHOWN_CHARACTERS)
    start = _place_of(answer, text) if answer else -1
    end = start + len(answer or "")
    spans = [(m.start(), m.end(), "tag") for m in MARKS.finditer(text)]
    spans = [s for s in spans if start < 0 or s[1] <= start or s[0] >= end]
    if start >= 0:
        spans.append((start, end, "answer"))
    return _joined(text, sorted(spans))


def _place_of(answer: str, text: str) -> int:
    """Where the answer was read: in the last complete answer tag, else as late as it stands."""
    tag = text.rfind(f"<{ANSWER}>", 0, max(0, text.rfind(f"</{ANSWER}>")))
    return text.find(answer, tag) if tag >= 0 else text.rfind(answer)


def _joined(text: str, spans: Sequence[tuple[int, int, str]]) -> str:
    parts, position = [], 0
    for start, end, kind in spans:
        parts.append(html.escape(text[position:start], quote=False))
        inner = html.escape(text[start:end], quote=False)
        parts.append(
            f"<mark>{inner}</mark>" if kind == "answer" else f"<span class='tag'>{inner}</span>"
        )
        position = end
    return "".join(parts) + html.escape(text[position:], quote=False)
