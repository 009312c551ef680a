"""The charts of a training: what they show, how to read them, and how they are drawn."""

import base64
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

from grpo_nb.views.sheet import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#3b78c4", "#c96f0a", "#3a9a5b")
COLUMNS, WIDTH, ROW = 4, 10.5, 1.7  # charts side by side; of the picture and of a row [inches]


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
    "distinct completions": (
        "At 100 % no two completions of a group are equal; near 0 all are alike, and learning "
        "ends. Unsloth's trainer on a GPU logs no entropy, but this.",
        *("groups/distinct", *SHARE),
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


def draw(
    lines: Sequence[Mapping[str, Any]], keys: Sequence[str] = (), on: "Figure | None" = None
) -> "Figure":
    """Every chart that the metrics fill.

    Args:
        lines: Of train/metrics.jsonl, of steps and of validations.
        keys: Metrics to draw, where not all that are known.
        on: An empty figure, such as pyplot's; a new one where there is none.

    Raises:
        ValueError: There is no line.
    """
    from matplotlib.figure import Figure

    if not lines:
        raise ValueError("no metrics to draw: train first, then read train/metrics.jsonl")
    table = pd.DataFrame([numbers(line) for line in lines])
    validation = table.filter(like="eval/").notna().any(axis=1)
    drawn = charts(keys or table.columns)
    rows = -(-len(drawn) // COLUMNS)
    figure = on or Figure()
    figure.set_size_inches(WIDTH, ROW * rows)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    edge = 0.3 / (ROW * rows)  # the same on a picture of few rows and of many
    figure.subplots_adjust(0.05, edge, 0.99, 1 - edge, wspace=0.25, hspace=0.5)
    for axis, chart in zip(axes, drawn, strict=False):
        _draw_chart(axis, chart, table[validation == (chart.kind == "points")])
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    return figure


def _draw_chart(axis: "Axes", chart: Chart, lines: pd.DataFrame) -> None:
    look = {"line": "-", "points": "o"}.get(chart.kind)
    for number, (series, color) in enumerate(zip(chart.series, COLORS, strict=False)):
        if series.low in lines:
            style = {"color": color, "alpha": 0.25 if look else 0.8, "label": series.label}
            ends = lines[series.low], lines[series.high]
            axis.fill_between(lines["step"], *ends, linewidth=0, **style)
        if look and series.key in lines:
            mark = "s" if number else look
            axis.plot(
                lines["step"],
                lines[series.key],
                mark,
                color=color,
                label=series.label,
                clip_on=False,
                fillstyle="none" if number else "full",  # one may lie on the other
            )
    if len(chart.series) > 1:
        axis.legend(frameon=False, fontsize=7)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, *chart.shown), max(high, *chart.shown))
    axis.set_title(chart.title, fontsize=9, loc="left")
    axis.set_title(_latest(chart, lines), fontsize=9, loc="right", fontweight="bold")
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def _latest(chart: Chart, lines: pd.DataFrame) -> str:
    """The last values; of a stack the sum."""
    keys = [chart.series[-1].high] if chart.kind == "area" else [s.key for s in chart.series]
    return " · ".join(shown(lines[k].iloc[-1], chart.form) for k in keys if k in lines)


def image(lines: Sequence[Mapping[str, Any]]) -> str:
    """The charts as an HTML image, which says the latest values to who cannot see it.

    It keeps its white ground, and so reads on a dark page too.
    """
    buffer = io.BytesIO()
    draw(lines).savefig(buffer, format="png", dpi=100)
    latest: dict[str, float] = {}
    for line in lines:
        latest |= numbers(line)
    said = [
        f"{chart.title}: "
        + ", ".join(f"{s.label} {shown(latest.get(s.key), chart.form)}" for s in chart.series)
        for chart in charts(latest)
    ]
    label = html.escape(f"charts of the training; {'; '.join(said)}", quote=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{label}" style="max-width: 100%" src="data:image/png;base64,{data}">'


def shown(value: float | None, form: str) -> str:
    """A number as text; a dash where there is none."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)
