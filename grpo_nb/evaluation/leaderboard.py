"""Runs compared: which is best on held-out prompts, and which differences are real.

Two runs are compared prompt by prompt, on the prompts that both held out, by the exact test
of McNemar on those that one of them answers better. With n runs there are n (n - 1) / 2 such
pairs; p is corrected for all of them by Holm's procedure, so that naming the best run after
having looked costs nothing. A real difference is one between these models: that a setting
caused it needs several seeds a setting.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb.evaluation.report import LEAST_PROMPTS, UNCLEAR
from grpo_nb.evaluation.statistics import bootstrap, holm, mcnemar
from grpo_nb.runs import NOTEBOOKS, Run, runs_root
from grpo_nb.runs import config as configs
from grpo_nb.runs.files import read_json

ALPHA = 0.05


class Board(NamedTuple):
    """What `compare` found.

    table: A line a run, best first: accuracy of greedy answers with its 95 % interval, the
        paired difference to the best run with interval, Holm's p and verdict, seconds, and the
        settings that are not the same in all runs.
    varied: The names of these settings.
    pairs: A line for two runs: shared prompts, difference, p, Holm's p, verdict.
    settings: Accuracy of the runs that differ in nothing but their seed: mean, min, max, runs.
    curves: {run: its metrics}.
    left_out: {run: why}.
    """

    table: pd.DataFrame
    varied: list[str]
    pairs: pd.DataFrame
    settings: pd.DataFrame
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
        if why := _unfinished(run):
            left_out[run.name] = why
        else:
            runs[run.name] = run
    if not runs:
        whys = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
        raise ValueError(f"no finished run among {len(places)} folders{whys}")
    scores = {name: _scores(run) for name, run in runs.items()}
    varied = _varied({name: run.config() for name, run in runs.items()})
    lines = pd.DataFrame([_line(run, scores[name]) for name, run in runs.items()])
    table = pd.concat([lines, varied.reset_index(drop=True)], axis=1)
    table = table.sort_values("accuracy", ascending=False, kind="stable", ignore_index=True)
    scores = pd.concat({name: scores[name] for name in table["run"]}, axis=1)
    pairs = _pairs(scores)
    table = pd.concat([table, _against_the_best(scores, pairs)], axis=1)
    curves = {n: pd.read_json(r / "train/metrics.jsonl", lines=True) for n, r in runs.items()}
    names = list(varied)
    return Board(table, names, pairs, _by_setting(table, names), curves, left_out)


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
    for stage, name in NOTEBOOKS.items():
        if (status := run.status(stage)) == "stale":
            return run.why_stale(stage)
        if status != "done":
            error = run.manifest().get(stage, {}).get("error")
            return f"{name} {status}: {error}" if error else f"{name} {status}"
    return ""


def _scores(run: Run) -> pd.Series:
    """What the last evaluated model scored on each held-out prompt, [question, reference]."""
    *_, last = read_json(run / "eval/report.json")["greedy"]
    lines = pd.read_parquet(run / "eval/samples.parquet")
    lines = lines[(lines["model"] == last) & (lines["decoding"] == "greedy")]
    return lines.groupby(["question", "reference"])["accuracy"].mean()


def _line(run: Run, scores: pd.Series) -> dict[str, Any]:
    models = list(read_json(run / "eval/report.json")["greedy"].values())
    low, high = models[-1]["intervals"]["accuracy"] or (np.nan, np.nan)
    before, accuracy = np.array([models[i]["accuracy"] for i in (0, -1)], dtype=float)
    return {
        **{"run": run.name, "accuracy": accuracy, "low": low, "high": high, "before": before},
        "measured_by": list(models[-1])[3],  # the first reward, after accuracy, format and total
        **{"format": models[-1]["format"], "prompts": len(scores)},
        "seconds": sum(entry["seconds"] for entry in run.manifest().values()),
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
        lines.append((better, worse, len(gain), gain.mean() if len(gain) else np.nan, p))
    table = pd.DataFrame(lines, columns=["better", "worse", "prompts", "difference", "p"])
    table["p_holm"] = holm(table["p"].to_numpy(dtype=float))
    real = (table["p_holm"] < ALPHA) & (table["prompts"] >= LEAST_PROMPTS)
    table["verdict"] = np.where(real, "real", UNCLEAR)
    return table


def _against_the_best(scores: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """Each run's paired difference to the first, with its interval; columns of `Board.table`."""
    gains = scores.sub(scores.iloc[:, 0], axis=0)  # NaN where a prompt is not shared
    low, high = bootstrap(gains.to_numpy(), np.outer([-0.5, 0.5], np.ones(len(gains.columns))))
    found = pairs[pairs["better"] == scores.columns[0]].set_index("worse").reindex(scores.columns)
    columns = {
        **{"difference": gains.mean(), "difference_low": low, "difference_high": high},
        **{"shared_prompts": gains.notna().sum(), "p_holm": found["p_holm"]},
        "verdict": found["verdict"].fillna("best"),
    }
    return pd.DataFrame(columns).reset_index(drop=True)


def _by_setting(table: pd.DataFrame, varied: Sequence[str]) -> pd.DataFrame:
    """Mean, least and greatest accuracy of the runs that differ in nothing but their seed."""
    names = [name for name in varied if name != "seed"] or ["measured_by"]
    groups = table.astype(dict.fromkeys(names, str)).groupby(names)["accuracy"]
    found = groups.agg(mean="mean", min="min", max="max", runs="count")
    return found.sort_values("mean", ascending=False).reset_index()


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
    for setting in board.varied:
        shown[setting] = table[setting].astype(str)
    shown["seconds"] = table["seconds"].map("{:.0f}".format)
    return shown


def _difference(line: Any) -> str:
    if not line.shared_prompts:
        return "no shared prompts"
    ends = f"{100 * line.difference_low:+.1f} … {100 * line.difference_high:+.1f}"
    shared = f"p {line.p_holm:.2g}, {line.shared_prompts:.0f} shared prompts"
    return f"{100 * line.difference:+.1f} points ({ends}), {line.verdict}: {shared}"


def show(board: Board) -> None:
    """Print everything that is not empty."""
    real = board.pairs[board.pairs["verdict"] == "real"]
    largest = real.drop(columns=["p", "verdict"]).sort_values("difference", ascending=False)[:10]
    tables = {
        f"{len(board.table)} runs; greedy answers, 95 % intervals; p after Holm": readable(board),
        f"{len(real)} of {len(board.pairs)} differences are real": largest,
        "Equal settings over seeds: accuracy": board.settings,
        "Left out": pd.DataFrame(board.left_out.items(), columns=["run", "why"]),
    }
    for head, frame in tables.items():
        if len(frame) or frame is largest:
            text = frame.to_string(index=False, float_format="{:.3g}".format)
            print(head, text if len(frame) else "", sep="\n", end="\n\n")
