"""Compare runs: which is best on held-out prompts, and which differences are real.

Two runs are compared prompt by prompt, on the prompts that both held out. McNemar's exact test
uses the prompts that one run answers better than the other. Among n runs there are n (n - 1) / 2
pairs, and Holm's procedure corrects p for all of them, so that the best run may be picked after
looking at the results. A "real" difference concerns these two models only. To show that a setting
caused the difference, run several seeds of each setting.
"""

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from grpo_nb import data
from grpo_nb.evaluation.report import LEAST_PROMPTS, UNCLEAR, greedy_answers
from grpo_nb.files import read_json
from grpo_nb.rewards.prompts import question_key
from grpo_nb.runs import Run, runs_root
from grpo_nb.runs import config as configs
from grpo_nb.stats import bootstrap, holm, mcnemar

ALPHA = 0.05


class Board(NamedTuple):
    """Hold the result of `compare`.

    table: One line per run, best first: accuracy of greedy answers with its 95 % interval, seconds,
        and the settings that differ between runs.
    pairs: One line per pair of runs, pairs with the best run first: shared prompts, the paired
        difference with its 95 % interval, p, Holm-adjusted p, verdict.
    settings: Accuracy over runs that differ only in their seed: mean, min, max, number of runs.
    curves: The metrics of each run, by name.
    left_out: The reason for each run that was left out, by name.
    """

    table: pd.DataFrame
    pairs: pd.DataFrame
    settings: pd.DataFrame
    curves: dict[str, pd.DataFrame]
    left_out: dict[str, str]


def compare(places: Sequence[str | Path]) -> Board:
    """Compare the runs in these folders, and return a `Board`.

    Folders without a finished run are left out, and the board names them.

    Raises:
        ValueError: None of the folders holds a finished run.
    """
    runs, left_out = {}, {}
    for place in map(Path, places):
        run = Run(place.absolute() if place.exists() else runs_root() / place)
        if why := run.why_undone():
            left_out[run.name] = why
        else:
            runs[run.name] = run
    if not runs:
        reasons = "".join(f"\n  {name}: {why}" for name, why in left_out.items())
        make = "make some, for example with python -m grpo_nb sweep notebooks/compare.yaml"
        raise ValueError(f"no finished run among {len(places)} folders: {make}{reasons}")
    scores = {name: _scores(run) for name, run in runs.items()}
    varied = _varied({name: run.config() for name, run in runs.items()})
    lines = pd.DataFrame(map(_line, runs.values()))
    table = pd.concat([lines, varied.reset_index(drop=True)], axis=1)
    table = table.sort_values("accuracy", ascending=False, kind="stable", ignore_index=True)
    scores = pd.concat({name: scores[name] for name in table["run"]}, axis=1)
    curves = {n: pd.read_json(r / "train/metrics.jsonl", lines=True) for n, r in runs.items()}
    return Board(table, _pairs(scores), _by_setting(table, list(varied)), curves, left_out)


def named(prefix: str) -> list[Path]:
    """Return the folders of the runs whose names start with a prefix."""
    return sorted(path for path in runs_root().glob(f"{prefix}*") if path.is_dir())


def _scores(run: Run) -> pd.Series:
    """Return the last model's score on each held-out prompt, indexed by question and reference.

    A question is identified by its text and its images.
    """
    _, last = greedy_answers(run)
    keys = dict(enumerate(map(question_key, data.load(run, "eval"))))
    return last.groupby([last["row"].map(keys), "reference"])["accuracy"].mean()


def _line(run: Run) -> dict[str, Any]:
    report = read_json(run / "eval/report.json")
    models = list(report["greedy"].values())
    low, high = models[-1]["intervals"]["accuracy"] or (np.nan, np.nan)
    before, accuracy = np.array([models[i]["accuracy"] for i in (0, -1)], dtype=float)
    line = {"run": run.name, "accuracy": accuracy, "low": low, "high": high, "before": before}
    line["measured_by"] = report["correct"]
    return line | {"seconds": sum(entry["seconds"] for entry in run.manifest().values())}


def _varied(configurations: dict[str, configs.RunConfig]) -> pd.DataFrame:
    """Return the settings that differ between runs, [runs, settings]."""
    flat = {n: {"profile": c.profile} | configs.flatten(c) for n, c in configurations.items()}
    frame = pd.DataFrame.from_dict(flat, orient="index")
    return frame.loc[:, frame.astype(str).nunique() > 1]


def _pairs(scores: pd.DataFrame) -> pd.DataFrame:
    """Compare each pair of runs.

    Each column of `scores` is a run, the best first; NaN marks the prompts that a run lacks.
    """
    lines = []
    for better, worse in combinations(scores, 2):
        gain = (scores[better] - scores[worse]).dropna().to_numpy()
        p = mcnemar(int((gain > 0).sum()), int((gain < 0).sum()))
        (low,), (high,) = bootstrap(gain[:, None], np.array([[-0.5], [0.5]]))
        mean = gain.mean() if len(gain) else np.nan
        lines.append((better, worse, len(gain), mean, low, high, p))
    columns = ["better", "worse", "prompts", "difference", "low", "high", "p"]
    table = pd.DataFrame(lines, columns=columns)
    table["p_holm"] = holm(table["p"].to_numpy(dtype=float))
    real = (table["p_holm"] < ALPHA) & (table["prompts"] >= LEAST_PROMPTS)
    table["verdict"] = np.where(real, "real", UNCLEAR)
    return table


def _by_setting(table: pd.DataFrame, varied: Sequence[str]) -> pd.DataFrame:
    """Return the mean, lowest and highest accuracy of runs that differ only in their seed."""
    names = [name for name in varied if name != "seed"] or ["measured_by"]
    groups = table.astype(dict.fromkeys(names, str)).groupby(names)["accuracy"]
    accuracy = groups.agg(mean="mean", min="min", max="max", runs="count")
    return accuracy.sort_values("mean", ascending=False).reset_index()


def report(runs: Sequence[str | Path], csv: str | None = None) -> None:
    """Print the tables of `compare`, and what was left out; write the leaderboard to `csv`."""
    board, form = compare(runs), {"index": False, "float_format": "{:.3g}".format}
    real = int((board.pairs["verdict"] == "real").sum())
    print(f"runs: {len(board.table)}; greedy answers, 95 % intervals; p after Holm")
    for table in (board.table, board.pairs) if len(board.pairs) else (board.table,):
        print(f"{table.to_string(**form)}\n")
    print(f"{real} of {len(board.pairs)} differences are real (p < 0.05)")
    print(f"\nEqual settings over seeds: accuracy\n{board.settings.to_string(**form)}")
    for name, why in board.left_out.items():
        print(f"left out: {name}: {why}")
    if csv:
        board.table.to_csv(csv, index=False)
