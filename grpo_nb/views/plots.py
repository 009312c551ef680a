"""Tables, and pictures that are saved as PNG too: lengths, learning curve, before and after."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from grpo_nb.runs import Run, atomic_path
from grpo_nb.views import charts
from grpo_nb.views.sheet import VERBATIM, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORED = 8  # runs that a picture tells apart
COLORS = GREY, BLUE, GREEN, ORANGE = "#9a9a9a", "#3b6fb6", "#3a9a5b", "#e08214"
DECODINGS = ("greedy", "sampled")


class Table(Styler):
    """A styled frame that reads as text, too, where HTML is not shown."""

    def __repr__(self) -> str:
        return self.data.to_string(index=False)


def _cell(value: object) -> object:
    return f"{value:.3g}" if isinstance(value, float) else value


def table(frame: pd.DataFrame) -> Table:
    """A frame to read: text left-aligned and never cut, tags shown as they are."""
    digest = hashlib.sha256(frame.to_csv().encode()).hexdigest()  # the same table, the same HTML
    style = Table(frame, uuid=digest[:8], cell_ids=False).hide(axis="index")
    style = style.set_table_attributes(f"class='{VERBATIM}'")
    style = style.format(_cell, escape="html", na_rep="None").format_index(
        lambda name: short(str(name)), axis=1
    )
    if "advantage" in frame:
        style = style.bar(["advantage"], align="zero", color=["#f2b8a0", "#a9cfa9"])
    text = "text-align: left; vertical-align: top"
    return style.set_table_styles(
        [
            {"selector": "th", "props": text},
            {"selector": "td", "props": f"{text}; white-space: pre-wrap"},
        ]
    )


def _subplots(columns: int, width: float, height: float) -> "tuple[Figure, list[Axes]]":
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, columns, figsize=(width, height), squeeze=False, layout="constrained"
    )
    plt.close(figure)  # IPython shows it as a cell's value, once
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def _save(figure: "Figure", run: Run, name: str) -> "Figure":
    with atomic_path(run / f"figures/{name}.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    return figure


def prompt_lengths(run: Run, report: dict, cap: int) -> "Figure":
    """Histogram of prompt lengths [tokens], with the median, the 99th percentile and the cap."""
    figure, (axis,) = _subplots(1, 6, 2.6)
    lengths = report["prompt_tokens"]
    axis.stairs(
        lengths["histogram"]["counts"], lengths["histogram"]["edges"], fill=True, color=BLUE
    )
    marks = {"half": lengths["p50"], "99 %": lengths["p99"], "cap": cap}
    for (name, place), color in zip(marks.items(), (GREY, ORANGE, GREEN), strict=True):
        axis.axvline(place, color=color, linestyle="--", label=f"{name}: {place}")
    axis.set(xlabel="prompt length [tokens]", ylabel="prompts")
    axis.legend(frameon=False)
    return _save(figure, run, "prompt_lengths")


def training(run: Run, metrics: Sequence[dict], keys: Sequence[str] = ()) -> "Figure":
    """The dashboard's charts, once the training is over, as figures/training.png; `charts.draw`."""
    import matplotlib.pyplot as plt

    figure = plt.figure()  # of pyplot's IPython shows a cell's value as a picture
    plt.close(figure)
    return _save(charts.draw(metrics, keys, figure), run, "training")


def learning_curves(curves: Mapping[str, pd.DataFrame], order: Sequence[str]) -> "Figure":
    """Weighted reward and validated accuracy of many runs; all but the first few are grey.

    Args:
        curves: Metrics of each run, a line a step or validation.
        order: The runs, best first.
    """
    figure, (reward, validated) = _subplots(2, 11, 3.4)
    colors = [f"C{i}" for i in range(COLORED)] + [GREY] * len(order)
    for place, (name, color) in reversed(list(enumerate(zip(order, colors, strict=False)))):
        lines = curves[name].set_index("step")
        style = {"color": color, "alpha": 1 if place < COLORED else 0.4}
        mean = lines["reward"].dropna().rolling(10, min_periods=1, center=True).mean()
        reward.plot(mean.index, mean, label=name if place < COLORED else None, **style)
        if "eval/accuracy" in lines:
            found = lines["eval/accuracy"].dropna()
            validated.plot(found.index, found, marker="o", markersize=3, **style)
    reward.set(title="weighted reward, mean over 10 steps", xlabel="step")
    validated.set(title="accuracy, validated", xlabel="step", ylim=(0, 1.05))
    figure.legend(frameon=False, fontsize=8, reverse=True, loc="outside right")
    return figure


def before_after(run: Run, report: Mapping[str, Any]) -> "Figure":
    """Accuracy and pass@k of each model, with 95 % intervals.

    Args:
        report: As `evaluation.run` gives it.
    """
    figure, (accuracy, curves) = _subplots(2, 9, 3.2)
    width, ks = 0.8 / len(report["models"]), np.arange(1, report["samples"] + 1)
    for number, (label, color) in enumerate(zip(report["models"], cycle(COLORS), strict=False)):
        for place, decoding in enumerate(DECODINGS):
            line = report[decoding][label]
            low, high = _interval(line, "accuracy")
            x, mean = place + (number + 0.5) * width - 0.4, line["accuracy"]
            name = label if place == 0 else None
            accuracy.bar(x, mean, 0.92 * width, color=color, label=name)
            accuracy.vlines(x, low, high, color="black", linewidth=1)
            top = np.fmax(mean, high) + 0.02
            accuracy.text(x, top, f"{mean:.0%}", ha="center", fontsize=8)
        line = report["sampled"][label]
        means = [line[f"pass@{k}"] for k in ks]
        low, high = np.array([_interval(line, f"pass@{k}") for k in ks]).T
        curves.errorbar(ks, means, [means - low, high - means], color=color, marker="o", capsize=2)
        if f"majority@{ks[-1]}" in line:
            curves.plot(ks[-1], line[f"majority@{ks[-1]}"], "D", color=color, mfc="white")
    accuracy.set(title="accuracy (bar: 95 %)", ylim=(0, 1.12), xticks=range(len(DECODINGS)))
    accuracy.set_xticklabels(DECODINGS)
    curves.set(title=f"pass@k; ◇ majority@{ks[-1]}", xlabel="k", xticks=ks, ylim=(0, 1.05))
    figure.legend(frameon=False, ncols=len(report["models"]), loc="outside upper center")
    return _save(figure, run, "before_after")


def _interval(line: Mapping[str, Any], name: str) -> tuple[float, float]:
    """The ends; NaN where there are none."""
    return line["intervals"][name] or (np.nan, np.nan)
