"""Tables, and pictures that are saved as PNG too: lengths, learning curve, before and after."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.io.formats.style import Styler

from grpo_nb.reward_lab import Probes
from grpo_nb.rewards import RewardSet, declared_range
from grpo_nb.runs import Run, atomic_path
from grpo_nb.views import charts
from grpo_nb.views.sheet import VERBATIM

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORED = 8  # runs that a picture tells apart
BLUE, ORANGE, GREEN, GREY = "#3b6fb6", "#e08214", "#3a9a5b", "#9a9a9a"


class Table(Styler):
    """A styled frame that reads as text, too, where HTML is not shown."""

    def __repr__(self) -> str:
        return self.data.to_string(index=False)


def _cell(value: object) -> object:
    return f"{value:.3g}" if isinstance(value, float) else value


def _head(name: object) -> str:
    return str(name).removesuffix("_reward").replace("_", " ")


def table(frame: pd.DataFrame) -> Table:
    """A frame to read: text left-aligned and never cut, tags shown as they are."""
    digest = hashlib.sha256(frame.to_csv().encode()).hexdigest()  # the same table, the same HTML
    style = Table(frame, uuid=digest[:8], cell_ids=False).hide(axis="index")
    style = style.set_table_attributes(f"class='{VERBATIM}'")
    style = style.format(_cell, escape="html", na_rep="None").format_index(_head, axis=1)
    if "advantage" in frame:
        style = style.bar(["advantage"], align="zero", color=["#f2b8a0", "#a9cfa9"])
    text = "text-align: left; vertical-align: top"
    return style.set_table_styles(
        [
            {"selector": "th", "props": text},
            {"selector": "td", "props": f"{text}; white-space: pre-wrap"},
        ]
    )


def _subplots(columns: int, width: float, height: float, rows: int = 1):
    import matplotlib.pyplot as plt

    size = (width, height)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    plt.close(figure)  # shown once, as the cell's value
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


def probe_map(run: Run, probes: Probes | None, preset: RewardSet) -> "Figure | None":
    """What each attack earned of each reward's range; a winning attack is marked."""
    if probes is None:  # a reward raised: the verdict says so, and nothing was tried
        return None
    names, table = preset.names, probes.table
    figure, (axis,) = _subplots(1, 1.6 + 1.1 * len(names) + 2.2, 0.8 + 0.2 * len(table))
    ends = [declared_range(func) for func in preset.reward_funcs]
    shares = [(table[n] - low) / (high - low) for n, (low, high) in zip(names, ends, strict=True)]
    axis.imshow(np.array(shares).T, aspect="auto", cmap="Blues", vmin=0, vmax=1.25)
    for (line, column), score in np.ndenumerate(table[names].to_numpy()):
        ink = "white" if shares[column][line] > 0.6 else "black"
        axis.text(column, line, f"{score:.2g}", ha="center", va="center", fontsize=7, color=ink)
    axis.set_xticks(range(len(names)), [_head(name).replace(" ", "\n") for name in names])
    totals = [f"{line.attack}  {line.total:.2f}" for line in table.itertuples()]
    axis.set_yticks(range(len(table)), totals, parse_math=False)
    for label, attack in zip(axis.get_yticklabels(), table["attack"], strict=True):
        if attack in probes.winners:
            label.set(color="#c0392b", fontweight="bold")
    axis.tick_params(
        labelsize=8, length=0, top=True, labeltop=True, bottom=False, labelbottom=False
    )
    axis.set_title(f"attack and its total; {len(probes.winners)} win", fontsize=9, loc="left")
    return _save(figure, run, "probes")


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
    """Accuracy and pass@k of each model with 95 % intervals, and prompts gained and lost.

    Args:
        report: As `evaluation.run` gives it; the last picture is of greedy answers, first model
            against last.
    """
    figure, (accuracy, curves, change) = _subplots(3, 12, 3.4)
    labels = list(report["models"])
    colors = dict(zip(labels, cycle([GREY, BLUE, GREEN, ORANGE]), strict=False))
    places, width = np.arange(2), 0.8 / len(labels)
    ks = np.arange(1, report["samples"] + 1)
    for i, (label, color) in enumerate(colors.items()):
        lines = [report[decoding][label] for decoding in ("greedy", "sampled")]
        means, ends = _means_and_ends(lines, ["accuracy"] * 2)
        xs = places + (i - (len(labels) - 1) / 2) * width
        accuracy.bar(xs, means, 0.92 * width, color=color, label=label)
        accuracy.vlines(xs, *ends, color="black", linewidth=1)
        for x, mean, top in zip(xs, means, np.fmax(means, ends[1]), strict=True):
            accuracy.text(x, top + 0.02, f"{mean:.0%}", ha="center", fontsize=8)
        means, ends = _means_and_ends([lines[1]] * len(ks), [f"pass@{k}" for k in ks])
        curves.errorbar(ks, means, abs(ends - means), color=color, marker="o", capsize=2)
        if f"majority@{ks[-1]}" in lines[1]:
            curves.plot(ks[-1], lines[1][f"majority@{ks[-1]}"], "D", color=color, mfc="white")
    accuracy.set(title="accuracy (bar: 95 %)", ylim=(0, 1.12), xticks=places)
    accuracy.set_xticklabels(["greedy", "sampled"])
    curves.set(title=f"pass@k; ◇ majority@{ks[-1]}", xlabel="k", xticks=ks, ylim=(0, 1.05))
    _gains_and_losses(change, [b for b in report["buckets"] if b["decoding"] == "greedy"])
    figure.legend(frameon=False, ncols=len(labels), loc="outside upper center")
    return _save(figure, run, "before_after")


def _means_and_ends(lines: Sequence[Mapping], names: Sequence[str]) -> tuple[Any, Any]:
    """Means, [figures], and the ends of their intervals, [2, figures]; NaN where there are none."""
    pairs = list(zip(lines, names, strict=True))
    ends = [line["intervals"][name] or (None, None) for line, name in pairs]
    means = [line[name] for line, name in pairs]
    return np.array(means, dtype=float), np.array(ends, dtype=float).T


def _gains_and_losses(axis: "Axes", buckets: Sequence[Mapping]) -> None:
    """Shares of each bucket's prompts that were gained (right) and lost (left)."""
    heads = [f"{b['by']}: {b['bucket']} ({b['prompts']})".removeprefix("length: ") for b in buckets]
    for key, sign, color in (("gained", 1, GREEN), ("lost", -1, ORANGE)):
        shares = [sign * line[key] / line["prompts"] for line in buckets]
        bars = axis.barh(range(len(heads)), shares, color=color)
        axis.bar_label(bars, [line[key] or "" for line in buckets], fontsize=8, padding=2)
    axis.set_yticks(range(len(heads)), heads, fontsize=8)
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set(title="prompts lost | gained, greedy", xlim=(-1.15, 1.15), xticks=[-1, 0, 1])
    axis.invert_yaxis()
    axis.xaxis.set_major_formatter(lambda share, _: f"{abs(share):.0%}")
