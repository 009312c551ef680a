"""What does the live dashboard cost? Figures in docs/figures.md.

    python benchmarks/dashboard.py

Milliseconds of the picture of the curves with three completions, and of an update between two
pictures, with 4 rewards, all phases, validations and 64 completions
a step, after 100, 1,000 and 5,000 steps. Without a browser; the HTML is handed to the widgets.
"""

import math
import statistics
import time

from grpo_nb.training import Buttons, Update
from grpo_nb.views import TrainingDashboard

NAMES = [f"{kind}_reward" for kind in ("correctness", "format", "reasoning", "length")]
SINGLE = ("reward", "frac_reward_zero_std", "entropy", "kl", "clip_ratio/region_mean", "grad_norm")
SINGLE += ("learning_rate", "completions/clipped_ratio", "groups/reward_p10", "groups/reward_p90")
SINGLE += (*(f"completions/{end}_length" for end in ("mean", "min", "max")), "step_time")
SINGLE += tuple(f"seconds/{phase}" for phase in ("generation", "reward", "update"))
TEXT = "<reasoning>so many words & signs</reasoning>" * 20 + "<answer>7</answer>"


def update(step: int) -> Update:
    keys = [*SINGLE, *(f"rewards/{name}/{k}" for name in NAMES for k in ("mean", "group_std"))]
    line = {key: 0.5 + 0.5 * math.sin(step * (place + 1)) for place, key in enumerate(keys)}
    if step % 50 == 0:
        line = {"eval/accuracy": 0.5, "eval/format": 0.9}
    scores = dict.fromkeys([*NAMES, "reward"], step % 7 / 7) | {"advantage": 0.5}
    completions = [{"question": "How many?", "completion": TEXT, **scores}] * 64
    return Update({"step": step, **line}, 5_000, completions, [])


def main() -> None:
    for steps in (100, 1_000, 5_000):
        dashboard, spent = TrainingDashboard(Buttons()), {True: [], False: []}
        for step in range(1, steps + 1):
            new, drawn = update(step), step > steps - 5
            dashboard._due = 0.0 if drawn else math.inf
            started = time.perf_counter()
            dashboard(new)
            spent[drawn].append((time.perf_counter() - started) * 1e3)
        size = sum(len(part.value) for part in (dashboard.curves, dashboard.completions)) / 1e3
        print(
            f"{steps:>5} steps: {statistics.median(spent[True]):4.0f} ms with a picture, "
            f"{statistics.median(spent[False]):.2f} ms without, {size:.0f} kB of HTML"
        )


if __name__ == "__main__":
    main()
