"""Draw charts of a run's training, and of an evaluation.

docs/reading-a-run.md explains how to read them. A run's charts are saved in its folder figures/.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation import DECODING
from grpo_nb.files import atomic_path, read_yaml
from grpo_nb.views.tables import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from grpo_nb.runs import Run

COLORS = "#3b78c4", "#c96f0a", "#3a9a5b", "#8a8a8a"
COLUMNS, WIDTH, ROW = 4, 10.5, 1.7  # charts side by side; figure width and row height [inches]


class Chart(NamedTuple):
    """Describe a chart: a curve per metric, or points if the metrics begin with "eval/".

    title: The title, with the unit.
    metrics: The metrics.
    form: The format in which the latest value is shown.
    always: Values that the axis always includes.
    band: Metrics of the two ends of a band around the first curve.
    """

    title: str
    metrics: Sequence[str]
    form: str = ".3g"
    always: Sequence[float] = (0,)
    band: Sequence[str] = ()

    @property
    def validation(self) -> bool:
        """Return whether the chart shows validations; other charts show training steps."""
        return self.metrics[0].startswith("eval/")


# The chart of the weighted total, then all other charts except those of individual rewards.
TOTAL, *OTHERS = [
    Chart(title, **fields)
    for title, fields in read_yaml(Path(__file__).with_name("charts.yaml")).items()
]


def charts(keys: Iterable[str]) -> list[Chart]:
    """Return the charts for which there are metrics; individual rewards come after the total."""
    keys = dict.fromkeys(keys)
    names = [match[1] for key in keys if (match := re.fullmatch("rewards/(.*)/mean", key))]
    rewards = [Chart(short(name), [f"rewards/{name}/mean"], always=(0, 1)) for name in names]
    every = [TOTAL, *rewards, *OTHERS]
    return [chart for chart in every if any(key in keys for key in chart.metrics)]


def finite(line: Mapping[str, Any]) -> dict[str, float]:
    """Return only the finite numbers of a metrics line."""
    return {k: v for k, v in line.items() if isinstance(v, int | float) and math.isfinite(v)}


def draw(lines: Sequence[Mapping[str, Any]], keys: Sequence[str] = ()) -> "Figure":
    """Draw every chart for which there are metrics.

    Args:
        lines: Lines of train/metrics.jsonl, for steps and for validations.
        keys: Metrics to draw; empty for all.

    Raises:
        ValueError: There are no lines.
    """

    if not lines:
        raise ValueError("no metrics to draw: train first, then read train/metrics.jsonl")
    table = pd.DataFrame([finite(line) for line in lines])
    validation = table.filter(like="eval/").notna().any(axis=1)
    parts = charts(key for key in keys or table.columns if key in table)
    rows = max(1, -(-len(parts) // COLUMNS))
    figure, axes = _subplots(rows, COLUMNS, (WIDTH, ROW * rows))
    for axis, chart in zip(axes, parts, strict=False):
        _draw_chart(axis, chart, table[validation == chart.validation])
    for axis in axes[len(parts) :]:
        axis.set_axis_off()
    return figure


def _draw_chart(axis: "Axes", chart: Chart, lines: pd.DataFrame) -> None:
    curves = [key for key in chart.metrics if key in lines]
    style = {"marker": "o", "markerfacecolor": "none", "linestyle": ""} if chart.validation else {}
    for key, color in zip(curves, COLORS, strict=False):
        label = key.rpartition("/")[2].replace("_", " ")
        label += f" {lines[key].iloc[-1]:{chart.form}}"
        axis.plot(lines["step"], lines[key], color=color, label=label, clip_on=False, **style)
    if chart.band and set(chart.band) <= set(lines.columns):
        low, high = (lines[key] for key in chart.band)
        axis.fill_between(lines["step"], low, high, color=COLORS[0], alpha=0.25, linewidth=0)
    low, high = axis.get_ylim()
    axis.set_ylim(min(low, *chart.always), max(high, *chart.always))
    axis.tick_params(labelsize=7)
    axis.locator_params(nbins=4)
    # Without `y`, matplotlib would measure all labels, which takes a third of the drawing time.
    axis.set_title(chart.title, fontsize=9, loc="left", y=1.0)
    if len(curves) > 1:
        axis.legend(frameon=False, fontsize=7)
    else:
        latest = f"{lines[curves[0]].iloc[-1]:{chart.form}}"
        axis.set_title(latest, fontsize=9, loc="right", y=1.0, fontweight="bold")


def image(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the charts as an HTML image.

    The image has a white background, so that it is readable on a dark page too.
    """
    from IPython.core.pylabtools import print_figure

    data = print_figure(draw(lines), base64=True, dpi=100)
    label = "charts of the training"
    return f'<img alt="{label}" style="max-width: 100%" src="data:image/png;base64,{data}">'


def _subplots(rows: int, columns: int, size: tuple[float, float]) -> "tuple[Figure, list[Axes]]":
    import matplotlib.pyplot as plt

    options = {"squeeze": False, "layout": "constrained", "dpi": 90}
    figure, axes = plt.subplots(rows, columns, figsize=size, **options)
    plt.close(figure)  # otherwise IPython would show it twice
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _save(figure: "Figure", run: "Run", name: str) -> "Figure":
    with atomic_path(run / f"figures/{name}.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    return figure


def training_charts(run: "Run", metrics: Sequence[dict]) -> "Figure":
    """Draw the dashboard's charts of a finished training run, and save figures/training.png."""
    return _save(draw(metrics), run, "training")


def before_after(run: "Run", report: Mapping[str, Any]) -> "Figure":
    """Draw each model's greedy accuracy, sampled accuracy and pass@k, with 95 % intervals.

    Args:
        run: The run that gets figures/before_after.png.
        report: The report of `evaluate`.
    """
    bars = [(decoding, decoding, "accuracy") for decoding in DECODING]
    ks = [k for k in (2, 4, 8, 16, 32, 64) if k <= report["samples"]]
    bars += [(f"pass@{k}", "sampled", f"pass@{k}") for k in ks]
    means, errors = {}, []
    for label in report["models"]:
        lines = [(report[decoding][label], key) for _, decoding, key in bars]
        means[label] = np.array([line[key] for line, key in lines], dtype=float)
        ends = [line["intervals"][key] or (np.nan, np.nan) for line, key in lines]
        errors.append(np.abs(np.array(ends).T - means[label]))  # below and above
    figure, (axis,) = _subplots(1, 1, (9, 3.2))
    look = {"color": list(COLORS[: len(means)]), "width": 0.8, "rot": 0}
    look |= {"legend": False, "ylabel": "correct"}
    table = pd.DataFrame(means, index=[name for name, *_ in bars])
    table.plot.bar(ax=axis, yerr=np.array(errors), ylim=(0, 1.12), **look)
    for container in axis.containers[1::2]:  # the other containers hold intervals
        axis.bar_label(container, fmt="{:.0%}", fontsize=8)
    figure.legend(frameon=False, ncols=len(means), loc="outside upper center")
    return _save(figure, run, "before_after")
