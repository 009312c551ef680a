"""Charts of a training, of many runs, and of an evaluation.

docs/reading-a-run.md explains how to read them. A run's charts are saved below its figures/.
"""

import base64
import html
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation import DECODING
from grpo_nb.runs import Run, atomic_path
from grpo_nb.views.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = BLUE, ORANGE, GREEN, GREY = "#3b78c4", "#c96f0a", "#3a9a5b", "#8a8a8a"
COLORED = 8  # runs that get a color of their own
LEGEND_COLUMNS, LEGEND_ROW = 2, 0.18  # curves side by side; height of a row [share of the axis]
COLUMNS, WIDTH, ROW = 4, 10.5, 1.7  # charts side by side; figure width and row height [inches]


class Chart(NamedTuple):
    """A chart of some metrics; of validations, whose metrics begin with "eval/", it shows points.

    title: The title, with the unit.
    metrics: The metrics, a curve each.
    form: The format of the latest value.
    shown: Values that the axis always includes.
    band: Metrics of a band around the first curve: its two ends, or one spread to each side.
    """

    title: str
    metrics: Sequence[str]
    form: str = ".3g"
    shown: tuple[float, ...] = (0,)
    band: tuple[str, ...] = ()

    @property
    def validation(self) -> bool:
        """Whether the chart shows validations; other charts show steps."""
        return self.metrics[0].startswith("eval/")


SHARE = (".0%", (0, 1))
LENGTHS = ("completions/min_length", "completions/max_length")
TOTAL = Chart("reward, weighted total", ["reward"], band=("groups/reward_p10", "groups/reward_p90"))
LIMITS = ["episodes/call_share", "episodes/malformed", "episodes/at_limit"]
SECONDS = ["seconds/generation", "seconds/reward", "seconds/update", "step_time"]
OTHERS = (
    Chart("validation", ["eval/exact", "eval/accuracy", "eval/format"], *SHARE),
    Chart("completion length [tokens]", ["completions/mean_length"], ".0f", band=LENGTHS),
    Chart("zero-advantage groups", ["frac_reward_zero_std"], *SHARE),
    Chart("truncated completions", ["completions/clipped_ratio"], *SHARE),
    Chart("episodes", LIMITS, *SHARE),
    Chart("what a call adds to the reward", ["episodes/gain"]),
    Chart("turns with calls", ["episodes/turns"], ".1f"),
    Chart("tool errors a call", ["episodes/tool_errors"], *SHARE),
    Chart("KL to the base [nats]", ["kl"]),
    Chart("entropy [nats a token]", ["entropy"]),
    Chart("distinct completions", ["groups/distinct"], *SHARE),
    Chart("clip ratio", ["clip_ratio/region_mean"], ".1%"),
    Chart("gradient norm", ["grad_norm"]),
    Chart("learning rate", ["learning_rate"], ".2g"),
    Chart("step time [s]", SECONDS, ".2g"),
    Chart("peak memory [GiB]", ["memory_gib"], ".2f"),
    Chart("vLLM's difference [nats]", ["sampling/sampling_logp_difference/mean"], ".2g"),
)


def charts(keys: Iterable[str]) -> list[Chart]:
    """Return the charts for which there are metrics, with each reward's after the total."""
    keys = dict.fromkeys(keys)
    means = [key for key in keys if key.startswith("rewards/") and key.endswith("/mean")]
    rewards = []
    for key in means:
        name = key.removesuffix("/mean")
        title, spread = short(name.removeprefix("rewards/")), (f"{name}/group_std",)
        rewards.append(Chart(title, [key], shown=(0, 1), band=spread))
    every = [TOTAL, *rewards, *OTHERS]
    return [chart for chart in every if any(key in keys for key in chart.metrics)]


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """Return only the finite numbers of a metrics line."""
    return {k: v for k, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}


def draw(
    lines: Sequence[Mapping[str, Any]], keys: Sequence[str] = (), on: "Figure | None" = None
) -> "Figure":
    """Draw every chart for which there are metrics.

    Args:
        lines: Lines of train/metrics.jsonl, of steps and of validations.
        keys: Metrics to draw; empty for all.
        on: An empty figure to draw on, such as pyplot's; None creates one.

    Raises:
        ValueError: There are no lines.
    """
    from matplotlib.figure import Figure

    if not lines:
        raise ValueError("no metrics to draw: train first, then read train/metrics.jsonl")
    table = pd.DataFrame([numbers(line) for line in lines])
    validation = table.filter(like="eval/").notna().any(axis=1)
    drawn = charts(keys or table.columns)
    rows = max(1, -(-len(drawn) // COLUMNS))
    figure = on or Figure()
    figure.set_size_inches(WIDTH, ROW * rows)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    edge = 0.3 / (ROW * rows)  # the same margin in inches for any number of rows
    figure.subplots_adjust(0.05, edge, 0.99, 1 - edge, wspace=0.25, hspace=0.5)
    for axis, chart in zip(axes, drawn, strict=False):
        _draw_chart(axis, chart, table[validation == chart.validation])
    for axis in axes[len(drawn) :]:
        axis.set_axis_off()
    return figure


def _draw_chart(axis: "Axes", chart: Chart, lines: pd.DataFrame) -> None:
    curves = [key for key in chart.metrics if key in lines]
    for key, color, marker in zip(curves, COLORS, "os^d", strict=False):
        label = key.rpartition("/")[2].replace("_", " ")
        label += f" {shown(lines[key].iloc[-1], chart.form)}"
        style = {"color": color, "label": label, "clip_on": False}
        if chart.validation:  # hollow markers, because points may coincide
            style |= {"marker": marker, "markerfacecolor": "none", "linestyle": ""}
        axis.plot(lines["step"], lines[key], **style)
    if chart.band and set(chart.band) <= set(lines.columns):
        mean, ends = lines[curves[0]], [lines[key] for key in chart.band]
        low, high = ends if len(ends) == 2 else (mean - ends[0], mean + ends[0])
        axis.fill_between(lines["step"], low, high, color=COLORS[0], alpha=0.25, linewidth=0)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, *chart.shown), max(high, *chart.shown))
    axis.tick_params(labelsize=7)
    axis.locator_params(nbins=4)
    if len(curves) > 1:
        _legend_above(axis, -(-len(curves) // LEGEND_COLUMNS))
    # With a height given, matplotlib need not measure all labels: a third of the drawing's time.
    axis.set_title(chart.title, fontsize=9, loc="left", y=1.0)
    if not chart.validation:  # whose legend has the latest value of each curve
        latest = shown(lines[curves[-1]].iloc[-1], chart.form)
        axis.set_title(latest, fontsize=9, loc="right", y=1.0, fontweight="bold")
    axis.spines[["top", "right"]].set_visible(False)


def _legend_above(axis: "Axes", rows: int) -> None:
    """Write the legend into room above the curves, which has no ticks."""
    low, high = axis.get_ylim()
    ticks = [tick for tick in axis.get_yticks() if low <= tick <= high]
    axis.set_ylim(low, high + (high - low) * LEGEND_ROW * rows)
    axis.set_yticks(ticks)
    look = {"frameon": False, "fontsize": 7, "borderaxespad": 0.4, "borderpad": 0}
    look |= {"handlelength": 1, "handletextpad": 0.4, "columnspacing": 0.8, "labelspacing": 0.2}
    axis.legend(loc="upper left", ncols=LEGEND_COLUMNS, **look)


def image(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the charts as an HTML image, with the latest values as its alternative text.

    The image has a white background, so that it is readable on a dark page too.
    """
    figure, buffer = draw(lines), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    values = "; ".join(_in_words(axis) for axis in figure.axes if axis.axison)
    label = html.escape(f"charts of the training; {values}", quote=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{label}" style="max-width: 100%" src="data:image/png;base64,{data}">'


def _in_words(axis: "Axes") -> str:
    """Return a chart's title and the latest values."""
    title, latest = (axis.get_title(loc=side) for side in ("left", "right"))
    legend = axis.get_legend()
    curves = " · ".join(text.get_text() for text in legend.get_texts()) if legend else latest
    return f"{title}: {curves}"


def shown(value: float | None, form: str) -> str:
    """Format a number; a missing or infinite one becomes a dash."""
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def _subplots(columns: int, width: float) -> "tuple[Figure, list[Axes]]":
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=(width, 3.2), squeeze=False, layout="constrained"
    )
    plt.close(figure)  # otherwise IPython would show it twice
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _save(figure: "Figure", run: Run, name: str) -> "Figure":
    with atomic_path(run / f"figures/{name}.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    return figure


def training_charts(run: Run, metrics: Sequence[dict], keys: Sequence[str] = ()) -> "Figure":
    """Draw the dashboard's charts of a finished training, and save figures/training.png."""
    import matplotlib.pyplot as plt

    figure = plt.figure()  # only pyplot's figures are shown by IPython as images
    plt.close(figure)
    return _save(draw(metrics, keys, figure), run, "training")


def learning_curves(curves: Mapping[str, pd.DataFrame], order: Sequence[str]) -> "Figure":
    """Draw weighted reward and validation accuracy of many runs; all but the best are grey.

    Args:
        curves: Metrics of each run, one line per step or validation.
        order: The names of the runs, best first.
    """
    figure, (reward, validated) = _subplots(2, 11)
    colors = [f"C{i}" for i in range(COLORED)] + [GREY] * len(order)
    for place, (name, color) in reversed(list(enumerate(zip(order, colors, strict=False)))):
        lines = curves[name].set_index("step")
        style = {"color": color, "alpha": 1 if place < COLORED else 0.4}
        mean = lines["reward"].dropna().rolling(10, min_periods=1, center=True).mean()
        reward.plot(mean.index, mean, label=name if place < COLORED else None, **style)
        if "eval/accuracy" in lines:
            accuracy = lines["eval/accuracy"].dropna()
            validated.plot(accuracy.index, accuracy, marker="o", markersize=3, **style)
    reward.set(title="weighted reward, mean over 10 steps", xlabel="step")
    validated.set(title="validation accuracy", xlabel="step", ylim=(0, 1.05))
    figure.legend(frameon=False, fontsize=8, reverse=True, loc="outside right")
    return figure


def before_after(run: Run, report: Mapping[str, Any]) -> "Figure":
    """Draw greedy and sampled accuracy and pass@k of each model, with 95 % intervals.

    Args:
        run: The run that gets figures/before_after.png.
        report: The report of `evaluation.run`.
    """
    shown = [(decoding, decoding, "accuracy") for decoding in DECODING]
    ks = [k for k in (2, 4, 8, 16, 32, 64) if k <= report["samples"]]
    shown += [(f"pass@{k}", "sampled", f"pass@{k}") for k in ks]
    means, reach = {}, []
    for label in report["models"]:
        lines = [(report[decoding][label], key) for _, decoding, key in shown]
        means[label] = np.array([line[key] for line, key in lines], dtype=float)
        ends = [line["intervals"][key] or (np.nan, np.nan) for line, key in lines]
        reach.append(np.abs(np.array(ends).T - means[label]))  # below and above
    figure, (axis,) = _subplots(1, 9)
    colors = [color for _, color in zip(means, cycle(COLORS), strict=False)]
    look = {"color": colors, "width": 0.8, "rot": 0, "legend": False, "ylabel": "correct"}
    table = pd.DataFrame(means, index=[name for name, *_ in shown])
    table.plot.bar(ax=axis, yerr=np.array(reach), ylim=(0, 1.12), **look)
    for bars in axis.containers[1::2]:  # every other container holds intervals
        axis.bar_label(bars, fmt="{:.0%}", fontsize=8)
    figure.legend(frameon=False, ncols=len(means), loc="outside upper center")
    return _save(figure, run, "before_after")
