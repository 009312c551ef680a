"""Can the end of a training be forecast from its beginning? Measured on the recorded runs.

    python benchmarks/forecast.py    # seconds; reads benchmarks/corpus

At two moments, after the baseline rollouts and after the first tenth of the steps, the held-out
accuracy at the end is forecast with an 80 % interval, and the probability that it is no better than
at the beginning. The constant forecast says what other trainings came to; the regression is a
ridge regression on what is known of the run, with the errors that it made on tasks left out of its
fit. Each is tested on a task that it has not seen, for a user's is not in the corpus. Of use is a
forecast whose interval holds 70 to 90 % of the ends, and whose errors (of the accuracy, and Brier's
score of the probability) are well below the constant's.
"""

from typing import Any

import numpy as np
from alarms import STEPS, read

EARLY = STEPS // 10
ENDS = [0.1, 0.9]  # of an 80 % interval
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


def constant(figures: np.ndarray, ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """The middle of all ends, for each of the new runs."""
    return np.full(len(new), np.median(ends))


def regression(figures: np.ndarray, ends: np.ndarray, new: np.ndarray) -> np.ndarray:
    """What ridge regression expects, for each of the new runs."""
    middle, scale = figures.mean(axis=0), figures.std(axis=0) + 1e-9
    design = np.column_stack([np.ones(len(ends)), (figures - middle) / scale])
    penalty = RIDGE * np.diag([0.0] + [1.0] * figures.shape[1])
    weights = np.linalg.solve(design.T @ design + penalty, design.T @ ends)
    return np.column_stack([np.ones(len(new)), (new - middle) / scale]) @ weights


def on_unseen_tasks(
    way: Any, figures: np.ndarray, ends: np.ndarray, tasks: np.ndarray
) -> np.ndarray:
    """What is expected of each run by the runs of all other tasks, [runs]."""
    expected = np.empty(len(ends))
    for task in set(tasks):
        unseen = tasks == task
        expected[unseen] = way(figures[~unseen], ends[~unseen], figures[unseen])
    return expected


def main() -> None:
    records = list(read().values())
    tasks = np.array([record["about"]["task"] for record in records])
    begins, ends = (
        np.array([record["about"][f"true/{end}"] for record in records])
        for end in ("first", "last")
    )
    no_gain = ends <= begins
    print(f"{len(records)} runs of {len(set(tasks))} tasks; {no_gain.mean():.0%} ended no better")
    print("| known | forecast | 80 % interval holds | its width | mean error | Brier's score |")
    print("|---|---|---|---|---|---|")
    for after_steps, moment in ((False, "the baseline"), (True, f"{EARLY} of {STEPS} steps")):
        figures = np.nan_to_num([known(record, after_steps) for record in records])
        for way in (constant, regression):
            expected = on_unseen_tasks(way, figures, ends, tasks)
            low, high, chance = np.empty((3, len(ends)))
            for task in set(tasks):
                new, old = tasks == task, tasks != task
                seen = figures[old], ends[old], tasks[old]
                errors = seen[1] - on_unseen_tasks(way, *seen)
                ways = expected[new, None] + errors
                low[new], high[new] = np.clip(np.quantile(ways, ENDS, axis=1), 0, 1)
                chance[new] = (ways <= begins[new, None]).mean(axis=1)
            holds = ((ends >= low - 1e-9) & (ends <= high + 1e-9)).mean()
            error = np.abs(np.clip(expected, 0, 1) - ends).mean()
            brier = ((chance - no_gain) ** 2).mean()
            print(f"| {moment} | {way.__name__} | {holds:.0%}", end=" | ")
            print(f"{(high - low).mean():.2f} | {error:.2f} | {brier:.2f} |")


if __name__ == "__main__":
    main()
