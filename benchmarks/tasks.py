"""Does GRPO raise each task on its tiny base? The table in data/task_base/README.md.

    python benchmarks/tasks.py                       # about 2 minutes a task on 2 cores
    python benchmarks/tasks.py --tasks qa --set grpo.max_steps=40
    python benchmarks/tasks.py --tasks calculator guess --seeds 5        # docs/environments.md

Each task runs through all four notebooks. A line says what the report of the fourth says on
held-out rows, base -> merged model: accuracy (mean of the first reward) and format, and the
seconds of the whole run.
"""

import argparse
import os
import tempfile
from itertools import product

from grpo_nb.files import read_json
from grpo_nb.pipeline.notebooks import assigned, run_pipeline
from grpo_nb.runs.config import TASKS

HAVE_A_BASE = [task for task, known in TASKS.items() if task == "math" or "tiny-cpu" in known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=HAVE_A_BASE)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    os.environ["GRPO_NB_RUNS"] = tempfile.mkdtemp()
    settings = assigned(options.set)
    for task, seed in product(options.tasks, range(options.seeds)):
        asked = {"task": task, "seed": seed, "data.eval_share": 0.32, **settings}
        run = run_pipeline(f"{task}-{seed}", "tiny-cpu", asked)
        report = read_json(run / "eval/report.json")
        for decoding in ("greedy", "sampled"):
            before, after = (report[decoding][name] for name in ("base", "merged"))
            changes = [
                f"{key} {before[key]:.3f} -> {after[key]:.3f}"
                for key in ("accuracy", "format", "turns")
                if after.get(key) is not None
            ]
            print(f"{task:<12} {seed} {decoding:<8}", *changes, sep="  ", flush=True)
        seconds = {stage: entry["seconds"] for stage, entry in run.manifest().items()}
        print(f"{task:<12} {seed} {sum(seconds.values()):.0f} s, of training {seconds['03']:.0f} s")


if __name__ == "__main__":
    main()
