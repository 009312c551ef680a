"""The charts of a training: what they show, and how to draw them as SVG text while it runs.

A curve keeps at most POINTS points, so that a redraw costs the same at any step. Text takes
the page's color, and so reads on light and on dark.
"""

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from grpo_nb.sheet import short

POINTS = 200  # of a curve; even, for pairs of them are merged
WIDTH, HEIGHT = 1000, 300  # of a drawing, stretched to its place
COLORS = ("#3b78c4", "#c96f0a", "#3a9a5b")  # 3:1 or better on white and on black
STYLE = """<style>
.training-charts { display: grid; gap: 14px 22px; line-height: 1.5; font-size: 12px; padding: 4px;
  grid-template-columns: repeat(auto-fill, minmax(230px, 1fr)); }
.training-charts figure { margin: 0; min-width: 0; }
.training-charts figcaption, .training-charts .ends { display: flex; gap: 8px;
  justify-content: space-between; white-space: nowrap; padding-bottom: 3px; }
.training-charts .ends { margin: 3px 0 0 46px; font-size: 11px; }
.training-charts .plot { display: grid; grid-template: 72px / 42px 1fr; column-gap: 4px; }
.training-charts .sides { display: flex; flex-direction: column; font-size: 11px;
  justify-content: space-between; text-align: right; line-height: 1; }
.training-charts svg { width: 100%; height: 72px; overflow: visible;
  border: solid rgba(128, 128, 128, .5); border-width: 0 0 1px 1px; }
.training-charts path { vector-effect: non-scaling-stroke; fill: none; stroke-width: 1.6;
  stroke-linejoin: round; stroke-linecap: round; }
</style>"""


class Series(NamedTuple):
    label: str
    key: str  # of the metric
    low: str = ""  # of its band
    high: str = ""


class Chart(NamedTuple):
    title: str
    how: str  # to read it
    series: Sequence[Series]
    form: str = ".3g"  # of a value
    shown: tuple[float, ...] = (0,)  # values that the axis holds in any case
    kind: str = "line"  # or "area", or "points"


SECONDS = ("generation", "reward", "update")
SHARE = (".0%", (0, 1))
ABOUT_REWARD = (
    "Mean of this reward over the step's completions; band: one spread within a group to each "
    "side. A reward without spread in its groups teaches nothing."
)
FIRST = Chart(
    "reward, weighted total",
    "Mean over the step's completions; band: 10th to 90th percentile of the groups' means. It "
    "should climb. Flat under a wide band: some prompts are solved and the others never.",
    [Series("mean", "reward", "groups/reward_p10", "groups/reward_p90")],
)
HELD_OUT = Chart(
    "validation",
    "Share of the prompts set aside answered correctly (disc) and in the right format (square). "
    "Falls while the reward climbs: the reward is being hacked.",
    [Series("accuracy", "eval/accuracy"), Series("format", "eval/format")],
    *(*SHARE, "points"),
)
STEP_TIME = Chart(
    "step time [s]",
    "Where a step goes; from below: generation, reward, update.",
    [Series(n, f"seconds/{n}", f"seconds/{n}/low", f"seconds/{n}/high") for n in SECONDS],
    kind="area",
)
WHOLE_STEP = STEP_TIME._replace(series=[Series("step", "step_time")], kind="line")
LENGTH = Chart(
    "completion length [tokens]",
    "Mean; band: shortest to longest. Growth that earns nothing is length creep.",
    [Series("mean", *(f"completions/{end}_length" for end in ("mean", "min", "max")))],
    ".0f",
)
SINGLE = {  # title: how to read it, its metric, and the form and the values of its axis
    "groups without signal": (
        "Share of groups whose completions all earn the same. Rises as prompts are mastered; "
        "near 100 % nothing is left to learn from.",
        *("frac_reward_zero_std", *SHARE),
    ),
    "truncated completions": (
        "Share cut at train.max_completion_length: their answer may never have come.",
        *("completions/clipped_ratio", *SHARE),
    ),
    "KL to the base [nats]": (
        "How far the policy has moved. A jump is a policy that leaves what the base knew.",
        "kl",
    ),
    "entropy [nats a token]": (
        "How unsure the policy is. Near 0 a group's completions are alike, and learning ends.",
        "entropy",
    ),
    "clip ratio": (
        "Share of tokens whose update was clipped; 0 where each sample is used once. A rise "
        "says that the steps are too large.",
        *("clip_ratio/region_mean", ".1%"),
    ),
    "gradient norm": ("Spikes call for a lower learning rate; 0: no signal.", "grad_norm"),
    "learning rate": ("Warm-up, then the schedule.", "learning_rate", ".2g"),
}


def charts(keys: Iterable[str]) -> list[Chart]:
    """The charts that these metrics fill, each reward's after the total."""
    keys, chosen = dict.fromkeys(keys), [FIRST]
    for key in keys:
        if key.startswith("rewards/") and key.endswith("/mean"):
            name = key.removeprefix("rewards/").removesuffix("/mean")
            series = Series("mean", key, f"{name}/low", f"{name}/high")
            chosen.append(Chart(short(name), ABOUT_REWARD, [series], shown=(0, 1)))
    chosen += [HELD_OUT, LENGTH]
    for title, (how, key, *look) in SINGLE.items():
        chosen.append(Chart(title, how, [Series("value", key)], *look))
    chosen.append(STEP_TIME if f"seconds/{SECONDS[0]}" in keys else WHOLE_STEP)
    return [chart for chart in chosen if any(series.key in keys for series in chart.series)]


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """A line's finite numbers, and the ends of the bands that follow from them."""
    values = {k: v for k, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}
    for key in [key for key in values if key.endswith("/group_std")]:
        name = key.removeprefix("rewards/").removesuffix("/group_std")
        if (mean := values.get(f"rewards/{name}/mean")) is not None:
            least, most = (0, max(1, mean)) if mean >= 0 else (min(-1, mean), 0)
            values[f"{name}/low"] = max(least, mean - values[key])
            values[f"{name}/high"] = min(most, mean + values[key])
    top = 0.0
    for name in SECONDS:
        if f"seconds/{name}" in values:
            values[f"seconds/{name}/low"], top = top, top + values[f"seconds/{name}"]
            values[f"seconds/{name}/high"] = top
    return values


class Figure(NamedTuple):  # of one metric, over the steps of a bucket
    count: int
    sum: float
    low: float
    high: float


Bucket = dict[str, Figure]


def _bucket(values: Mapping[str, float]) -> Bucket:
    return {key: Figure(1, value, value, value) for key, value in values.items()}


def _merged(one: Bucket, other: Bucket) -> Bucket:
    both = one | other
    for k in one.keys() & other.keys():
        (n, total, low, high), more = one[k], other[k]
        both[k] = Figure(n + more[0], total + more[1], min(low, more[2]), max(high, more[3]))
    return both


class History:
    """Metrics in at most POINTS buckets of steps: where they are full, pairs are merged."""

    def __init__(self) -> None:
        self.keys: dict[str, None] = {}
        self._buckets: list[Bucket] = []
        self._stride, self._count = 1, 0  # steps in a full bucket, and in all
        self.first, self.last = {}, {}

    def add(self, values: Mapping[str, float]) -> None:
        self.keys |= dict.fromkeys(values)
        self.first, self.last = self.first or values, values
        if self._count % self._stride:
            self._buckets[-1] = _merged(self._buckets[-1], _bucket(values))
        else:
            if len(self._buckets) == POINTS:
                pairs = zip(self._buckets[::2], self._buckets[1::2], strict=True)
                self._buckets = [_merged(*pair) for pair in pairs]
                self._stride *= 2
            self._buckets.append(_bucket(values))
        self._count += 1

    @property
    def shown(self) -> list[Bucket]:
        """The buckets, between the very first step and the very last one."""
        if self._stride == 1:
            return self._buckets
        return [_bucket(self.first), *self._buckets, _bucket(self.last)]


Points = list[tuple[int, int] | None]  # None: a gap


def draw(chart: Chart, history: History, start: float, end: float) -> str:
    """One chart as HTML: title, last value, axis ends, and the curves as SVG.

    Args:
        chart: What to draw.
        history: Its metrics.
        start: First step, where the axis begins.
        end: Latest step, where it ends.
    """
    buckets = history.shown
    low, high = _ends(chart, buckets)
    wide, tall = WIDTH / max(1, end - start), HEIGHT / (high - low)
    steps = (b["step"] for b in buckets)
    xs = [round((total / count - start) * wide) for count, total, *_ in steps]

    def points(key: str, place: int = 1) -> Points:
        """The means, or of a Figure's other places the least (2) or the greatest (3)."""
        pairs = zip(xs, [bucket.get(key) for bucket in buckets], strict=True)
        if place == 1:
            return [f and (x, round((high - f[1] / f[0]) * tall)) for x, f in pairs]
        return [f and (x, round((high - f[place]) * tall)) for x, f in pairs]

    draw_one = {"line": _line, "area": _area, "points": _dots}[chart.kind]
    pairs = zip(chart.series, COLORS, strict=False)
    drawn = "".join(draw_one(series, color, points) for series, color in pairs)
    last, form = history.last, chart.form
    keys = [chart.series[-1].high] if chart.kind == "area" else [s.key for s in chart.series]
    value = " · ".join(shown(last.get(key), form) for key in keys)
    title, low_text, high_text = html.escape(chart.title), shown(low, form), shown(high, form)
    each = ", ".join(f"{s.label} {shown(last.get(s.key), form)}" for s in chart.series)
    label = f"{title} at step {end:.0f}: {html.escape(each)}; axis from {low_text} to {high_text}"
    return (
        f"<figure title='{html.escape(chart.how)}'><figcaption><span>{title}</span><b>{value}</b>"
        f"</figcaption><div class='plot'><div class='sides'><span>{high_text}</span>"
        f"<span>{low_text}</span></div><svg role='img' aria-label='{label}' "
        f"viewBox='0 0 {WIDTH} {HEIGHT}' preserveAspectRatio='none'>{drawn}</svg></div>"
        f"<div class='ends'><span>{start:.0f}</span>{_key(chart)}<span>{end:.0f}</span></div>"
        f"</figure>"
    )


def shown(value: float | None, form: str) -> str:
    """A number as text; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _key(chart: Chart) -> str:
    items = zip("●■" if chart.kind == "points" else "■■■", COLORS, chart.series, strict=False)
    texts = [f"<span style='color:{color}'>{mark}</span> {s.label}" for mark, color, s in items]
    return f"<span>{' '.join(texts)}</span>" if len(chart.series) > 1 else ""


def _ends(chart: Chart, buckets: Sequence[Bucket]) -> tuple[float, float]:
    """The least and the greatest of all that is drawn."""
    keys = [key for series in chart.series for key in series[1:]]
    figures = [bucket[key] for key in keys for bucket in buckets if key in bucket]
    low = min([*chart.shown, *[figure[2] for figure in figures]])
    high = max([figure[3] for figure in figures], default=0)
    high = max(high, 0 if low < 0 >= high else max(chart.shown))  # a penalty ends at 0
    return low, high if high > low else low + 1


def _runs(points: Iterable[Any]) -> list[list[Any]]:
    """The stretches between gaps."""
    return [list(run) for there, run in groupby(points, key=lambda p: p is not None) if there]


def _line(series: Series, color: str, points: Callable[..., Points]) -> str:
    """A curve over its band, with a tick from least to greatest where a point is of many steps."""
    curve, *ends = (points(series.key, place) for place in (1, 2, 3))
    ticks = "".join(f"M{a[0]} {a[1]}V{b[1]}" for a, b in zip(*ends, strict=True) if a != b)
    path = "".join(f"M{_joined(run)}h0" for run in _runs(curve))
    (x, y) = curve[-1] or (-99, -99)
    return (
        f"{_area(series, color, points, 0.25)}<g stroke='{color}'>"
        f"<path d='{ticks}' opacity='.35'/><path d='{path}'/>"
        f"<path d='M{x} {y}h0' style='stroke-width:5'/></g>"
    )


def _area(series: Series, color: str, points: Callable[..., Points], opacity: float = 0.8) -> str:
    if not series.low:
        return ""
    sides = zip(points(series.low), points(series.high), strict=True)
    runs = _runs(pair if None not in pair else None for pair in sides)
    path = "".join(
        f"M{_joined([high for _, high in run])}L{_joined([low for low, _ in reversed(run)])}Z"
        for run in runs
    )
    return f"<path d='{path}' style='fill:{color}' opacity='{opacity}'/>" if path else ""


def _dots(series: Series, color: str, points: Callable[..., Points]) -> str:
    path = "".join(f"M{point[0]} {point[1]}h0" for point in points(series.key) if point)
    look = f"stroke-width:7;stroke-linecap:{'round' if color == COLORS[0] else 'square'}"
    return f"<path d='{path}' stroke='{color}' style='{look}'/>"


def _joined(points: Sequence[tuple[int, int]]) -> str:
    return "L".join(f"{x} {y}" for x, y in points)
