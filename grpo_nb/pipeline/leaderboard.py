"""Runs compared: which is best on held-out prompts, which differences are real, what mattered.

Two runs are compared prompt by prompt, on the prompts that both held out, by the exact test
of McNemar on those that one of them answers better. With n runs there are n (n - 1) / 2 such
pairs; p is corrected for all of them by Holm's procedure, so that naming the best run after
having looked costs nothing. A real difference is one between these models: that a setting
caused it needs several seeds a setting.
"""

import base64
import html
import io
import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation.report import LEAST_PROMPTS, UNCLEAR
from grpo_nb.reward_lab.intervals import bootstrap, holm, mcnemar
from grpo_nb.runs import NOTEBOOKS, Run, runs_root
from grpo_nb.runs import config as configs
from grpo_nb.views import plots

if TYPE_CHECKING:
    from rich.console import Console

DECODING = "greedy"
ALPHA = 0.05
MOST_VALUES = 5  # a number with more is cut into thirds


class Board(NamedTuple):
    """What `compare` found.

    table: A line a run, best first: accuracy of greedy answers with its 95 % interval, the
        paired difference to the best run with interval, Holm's p and verdict, cost, and what
        sets the run apart.
    pairs: A line for two runs: shared prompts, difference, p, Holm's p, verdict.
    settings: A line a setting that differs: variance explained, rank correlation.
    over_seeds: Accuracy of equal settings over seeds; empty where seeds do not differ.
    curves: {run: its metrics}.
    left_out: {run: why}.
    """

    table: pd.DataFrame
    pairs: pd.DataFrame
    settings: pd.DataFrame
    over_seeds: pd.DataFrame
    curves: dict[str, pd.DataFrame]
    left_out: dict[str, str]


def compare(places: Sequence[str | Path]) -> Board:
    """Compare the runs in these folders; what is no finished run is left out.

    Raises:
        ValueError: No finished run among them.
    """
    runs, left_out = {}, {}
    for place in map(Path, places):
        run = Run(place.name)
        run.path = place.resolve()
        why = _unfinished(run)
        if not why:
            runs[run.name] = run
        elif place.suffix != ".sweep":
            left_out[place.name] = why
    if not runs:
        whys = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
        raise ValueError(f"no finished run among {len(places)} folders{whys}")
    scores = {name: _scores(run) for name, run in runs.items()}
    varied = _varied({name: run.config() for name, run in runs.items()})
    lines = [_line(run, scores[name]) for name, run in runs.items()]
    table = pd.concat([pd.DataFrame(lines), varied.reset_index(drop=True)], axis=1)
    table = table.sort_values("accuracy", ascending=False, kind="stable", ignore_index=True)
    scores = pd.concat({name: scores[name] for name in table["run"]}, axis=1)
    pairs = _pairs(scores)
    table = pd.concat([table, _against_the_best(scores, pairs)], axis=1)
    names = list(varied)
    curves = {n: pd.read_json(r / "train/metrics.jsonl", lines=True) for n, r in runs.items()}
    mattered, over_seeds = importance(table, names), _over_seeds(table, names)
    return Board(table, pairs, mattered, over_seeds, curves, left_out)


def named(prefix: str) -> list[Path]:
    """Folders of the runs whose names begin so.

    Raises:
        ValueError: There are none.
    """
    found = sorted(path for path in runs_root().glob(f"{prefix}*") if path.is_dir())
    if not found:
        raise ValueError(
            f"no run in {runs_root()} is called {prefix}…: make some, for example with "
            "python -m grpo_nb sweep notebooks/compare.yaml"
        )
    return found


def _unfinished(run: Run) -> str:
    manifest = run.manifest()
    for stage, name in NOTEBOOKS.items():
        entry = manifest.get(stage, {})
        if (status := run.status(stage)) == "stale":
            return run.why_stale(stage)
        if status != "done":
            return f"{name} {status}: {entry['error']}" if "error" in entry else f"{name} {status}"
    report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    return "" if "models" in report else "evaluated by an older version: run it --from 04"


def _scores(run: Run) -> pd.Series:
    """What the last evaluated model scored on each held-out prompt, [question, gold]."""
    report = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))
    lines = pd.read_parquet(run / "eval/samples.parquet")
    lines = lines[(lines["model"] == list(report["models"])[-1]) & (lines["decoding"] == DECODING)]
    return lines.groupby(["question", "gold"])["accuracy"].mean()


def _line(run: Run, scores: pd.Series) -> dict[str, Any]:
    models = json.loads((run / "eval/report.json").read_text(encoding="utf-8"))[DECODING]
    first, last = (list(models.values())[i] for i in (0, -1))
    low, high = last["intervals"]["accuracy"] or (np.nan, np.nan)
    before, accuracy = np.array([first["accuracy"], last["accuracy"]], dtype=float)  # None: NaN
    rewards = list(last)[3:]  # after accuracy, format and the total
    entries = run.manifest().values()
    on_gpu = sum(entry["seconds"] for entry in entries if entry.get("gpu"))
    return {
        **{"run": run.name, "accuracy": accuracy, "low": low, "high": high},
        **{"before": before, "format": last["format"]},
        **{"measured_by": rewards[0], "prompts": len(scores)},
        **{"seconds": sum(entry["seconds"] for entry in entries), "gpu_hours": on_gpu / 3600},
    }


def _varied(found: dict[str, configs.RunConfig]) -> pd.DataFrame:
    """The settings that are not the same in all runs, [runs, settings]."""
    flat = {name: {"profile": c.profile} | configs.flatten(c) for name, c in found.items()}
    frame = pd.DataFrame.from_dict(flat, orient="index")
    return frame.loc[:, frame.astype(str).nunique() > 1]


def _pairs(scores: pd.DataFrame) -> pd.DataFrame:
    """Every pair of runs, the better first; `scores` is NaN where a run did not hold out."""
    lines = []
    for better, worse in combinations(scores, 2):
        gain = (scores[better] - scores[worse]).dropna().to_numpy()
        p = mcnemar(int((gain > 0).sum()), int((gain < 0).sum()))
        mean = gain.mean() if len(gain) else np.nan
        lines.append((better, worse, len(gain), mean, p))
    columns = ["better", "worse", "prompts", "difference", "p"]
    table = pd.DataFrame(lines, columns=columns)
    table["p_holm"] = holm(table["p"].to_numpy(dtype=float))
    real = (table["p_holm"] < ALPHA) & (table["prompts"] >= LEAST_PROMPTS)
    table["verdict"] = np.where(real, "real", UNCLEAR)
    return table


def _against_the_best(scores: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Each run's paired difference to the first, with its interval; columns of `Board.table`."""
    best = pairs[pairs["better"] == scores.columns[0]].set_index("worse")
    lines: list[dict[str, Any]] = [{"verdict": "best"}]
    for name in scores.columns[1:]:
        loss = (scores[name] - scores.iloc[:, 0]).dropna().to_numpy()[:, None]
        ends = bootstrap(loss, np.array([[-0.5], [0.5]]))[:, 0] if len(loss) else [np.nan] * 2
        line = {"difference": -best["difference"][name], "shared_prompts": len(loss)}
        line |= {"difference_low": ends[0], "difference_high": ends[1]}
        lines.append(line | best.loc[name, ["p_holm", "verdict"]].to_dict())
    columns = ["difference", "difference_low", "difference_high", "shared_prompts", "p_holm"]
    return pd.DataFrame(lines, columns=[*columns, "verdict"])


def _over_seeds(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """Mean, least and greatest accuracy of the runs that differ in nothing but their seed."""
    others = [name for name in names if name != "seed"]
    if "seed" not in names:
        return pd.DataFrame()
    by = table[others].astype(str) if others else pd.Series("all", table.index, name="settings")
    keys = [by[name] for name in others] if others else [by]
    found = table.groupby(keys)["accuracy"].agg(["mean", "min", "max", "count"])
    found = found.rename(columns={"count": "runs"}).sort_values("mean", ascending=False)
    return found.reset_index()


def importance(table: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    """How much of the accuracy's variance between runs goes with each setting.

    `explained` is eta squared corrected for the number of groups (Kelley's epsilon squared),
    so that chance alone gives 0 on average; numbers of more than five values are cut into
    thirds. `rank_correlation` is Spearman's, of numbers. Settings that were varied together
    share what they explain.

    Source: Kelley 1935, https://doi.org/10.1073/pnas.21.9.554.
    """
    score, lines = table["accuracy"], []
    for name in names:
        values = pd.to_numeric(table[name], errors="coerce")
        number = values.notna().all() and table[name].map(type).ne(bool).all() and name != "seed"
        groups = table[name].astype(str)
        if number and values.nunique() > MOST_VALUES:
            groups = pd.qcut(values.rank(method="first"), 3, labels=False)
        inside = ((score - score.groupby(groups).transform("mean")) ** 2).sum()
        total = ((score - score.mean()) ** 2).sum()
        free, runs = len(score) - groups.nunique(), len(score)
        known = free > 0 and total > 0
        explained = max(0, 1 - inside / free / (total / (runs - 1))) if known else np.nan
        rank = values.rank().corr(score.rank()) if number and total > 0 else np.nan
        line = {"setting": name, "values": table[name].astype(str).nunique()}
        lines.append(line | {"explained": explained, "rank_correlation": rank})
    columns = ["setting", "values", "explained", "rank_correlation"]
    return pd.DataFrame(lines, columns=columns).sort_values(
        ["explained", "setting"], ascending=[False, True], ignore_index=True
    )


def readable(board: Board) -> pd.DataFrame:
    """The table as it is shown: one column for a figure and its interval."""
    table = board.table
    shown = table[["run"]].copy()
    shown["held-out accuracy"] = [
        f"{line.accuracy:.1%} ({line.low:.1%} … {line.high:.1%})" for line in table.itertuples()
    ]
    shown["against the best"] = ["best", *map(_difference, table.iloc[1:].itertuples())]
    if table["measured_by"].nunique() > 1:  # then figures mean different things
        shown["measured by"] = table["measured_by"]
    shown["before"] = table["before"].map("{:.1%}".format)
    for setting in board.settings["setting"]:
        shown[setting] = table[setting].astype(str)
    shown["seconds"] = table["seconds"].map("{:.0f}".format)
    if table["gpu_hours"].any():
        shown["GPU hours"] = table["gpu_hours"].map("{:.2f}".format)
    return shown


def _difference(line: Any) -> str:
    if not line.shared_prompts:
        return "no shared prompts"
    ends = f"{100 * line.difference_low:+.1f} … {100 * line.difference_high:+.1f}"
    shared = f"p {line.p_holm:.2g}, {line.shared_prompts:.0f} shared prompts"
    return f"{100 * line.difference:+.1f} points ({ends}), {line.verdict}: {shared}"


def sections(board: Board) -> list[tuple[str, pd.DataFrame]]:
    """Heading and table of everything that is not empty."""
    real = board.pairs[board.pairs["verdict"] == "real"]
    best = f"{len(board.table)} runs; greedy answers, 95 % intervals; p after Holm"
    found = f"{len(real)} of {len(board.pairs)} differences are real"
    found += "; the largest:" if len(real) else ""
    largest = real.sort_values("difference", ascending=False).head(10)
    left_out = pd.DataFrame(board.left_out.items(), columns=["run", "why"])
    tables = {
        best: readable(board),
        found: largest.drop(columns=["p", "verdict"]),
        "Equal settings over seeds: accuracy": board.over_seeds,
        "Accuracy's variance between runs, explained by": board.settings,
        "Left out": left_out,
    }
    return [(head, table) for head, table in tables.items() if len(table) or head == found]


def show(board: Board, console: "Console") -> None:
    from rich.table import Table

    for head, frame in sections(board):
        table = Table(*map(str, frame.columns), title=head, title_justify="left")
        for line in frame.itertuples(index=False):
            cells = [f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in line]
            table.add_row(*("–" if cell == "nan" else cell for cell in cells))
        console.print(table if len(frame) else head)


def page(board: Board) -> str:
    """All of it as one HTML file, learning curves included."""
    image = io.BytesIO()
    plots.learning_curves(board.curves, board.table["run"]).savefig(image, format="png", dpi=110)
    parts = [f"<h2>{html.escape(head)}</h2>{_html(table)}" for head, table in sections(board)]
    data = base64.b64encode(image.getvalue()).decode()
    style = "body{font-family:sans-serif;margin:2em}td,th{padding:2px 10px}img{max-width:100%}"
    return (
        "<!doctype html><meta charset='utf-8'><title>Runs compared</title>"
        f"<style>{style}</style>{''.join(parts)}<h2>Learning curves</h2>"
        f"<img alt='learning curves' src='data:image/png;base64,{data}'>"
    )


def _html(frame: pd.DataFrame) -> str:
    return plots.table(frame).to_html() if len(frame) else ""
