"""Can the end of a training be forecast from its beginning? Measured on the recorded runs.

    python benchmarks/forecast.py    # seconds; reads benchmarks/corpus

Two moments: after the baseline rollouts, and after the first tenth of the steps. Three ways to make
of what is known then the held-out accuracy at the end, with an 80 % interval: the accuracies that
other trainings ended with; the same of the five that were most like this one; ridge regression with
the quantiles of its leave-one-out errors. A task is always left out of what is fitted, for a user's
is not in the corpus. Of use is a forecast whose 80 % interval holds 70 to 90 % of the ends, and
whose error is well below that of the first way, which knows nothing of the run.
"""

from typing import Any

import numpy as np
from alarms import STEPS, read

EARLY = STEPS // 10
ENDS = [0.1, 0.9]  # of an 80 % interval
NEIGHBOURS = 5
RIDGE = 1.0


def known(record: dict[str, Any], after_steps: bool) -> list[float]:
    """What a user knows of a run: figures of its baseline, and of its first steps."""
    about = record["about"]
    rate, best = about["baseline/pass@1"], about["baseline/pass@8"]
    figures = [rate, best - rate, about["baseline/share of zero-advantage groups"]]
    if not after_steps:
        return figures
    first, (_, low, high) = next(iter(about["rewards"].items()))
    means = [line[f"rewards/{first}/mean"] for line in record["lines"] if "reward" in line]
    early = (np.array(means[:EARLY], dtype=float) - low) / ((high - low) or 1)
    before, after = early.reshape(2, -1).mean(axis=1)
    return [*figures, after - rate, after - before]


def anything(figures: np.ndarray, ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """[expected, low, high] by the ends of all other trainings."""
    return np.array([np.median(ends), *np.quantile(ends, ENDS)])


def alike(figures: np.ndarray, ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The same by those that began most alike."""
    near = np.abs((figures - new) / (figures.std(axis=0) + 1e-9)).sum(axis=1).argsort()
    return anything(figures, ends[near[:NEIGHBOURS]], new)


def regressed(figures: np.ndarray, ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The same by ridge regression; its errors are those of runs that it was not fitted to."""
    middle, scale = figures.mean(axis=0), figures.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(ends)), (figures - middle) / scale])
    penalty = RIDGE * np.diag([0.0] + [1.0] * figures.shape[1])
    solve = np.linalg.solve(design.T @ design + penalty, design.T)
    weights, leverage = solve @ ends, np.einsum("ij,ji->i", design, solve)
    errors = (ends - design @ weights) / (1 - leverage)
    expected = weights @ [1.0, *((new - middle) / scale)]
    return np.clip([expected, *(expected + np.quantile(errors, ENDS))], 0, 1)


def main() -> None:
    records = list(read().values())
    tasks = np.array([record["about"]["task"] for record in records])
    ends = np.array([record["about"]["true/last"] for record in records])
    begins = np.array([record["about"]["true/first"] for record in records])
    print(
        f"{len(records)} runs of {len(set(tasks))} tasks; {(ends <= begins).mean():.0%} no better"
    )
    print("| known | forecast by | 80 % interval holds | by task | its width | mean error |")
    print("|---|---|---|---|---|---|")
    for after_steps, moment in ((False, "the baseline"), (True, f"{EARLY} of {STEPS} steps")):
        figures = np.nan_to_num([known(record, after_steps) for record in records])
        for way in (anything, alike, regressed):
            made = np.array(
                [
                    way(figures[tasks != task], ends[tasks != task], one)
                    for one, task in zip(figures, tasks, strict=True)
                ]
            )
            expected, low, high = made.T
            holds = (ends >= low - 1e-9) & (ends <= high + 1e-9)
            shares = [holds[tasks == task].mean() for task in sorted(set(tasks))]
            width, error = (high - low).mean(), np.abs(expected - ends).mean()
            print(
                f"| {moment} | {way.__name__} | {holds.mean():.0%} | {min(shares):.0%} to "
                f"{max(shares):.0%} | {width:.2f} | {error:.2f} |"
            )


if __name__ == "__main__":
    main()
