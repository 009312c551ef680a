"""Does GRPO raise each task on its tiny base? The table in data/task_base/README.md.

    python benchmarks/tasks.py                       # about 2 minutes a task on 2 cores
    python benchmarks/tasks.py --tasks qa --set train.max_steps=40

Each task runs through all four notebooks. A line says what the report of the fourth says on
held-out rows, base -> merged model: accuracy (mean of the first reward) and format, and the
seconds of the whole run.
"""

import argparse
import os
import tempfile

from grpo_nb.pipeline.notebooks import run_pipeline
from grpo_nb.runs.config import parse_assignment
from grpo_nb.runs.files import read_json
from grpo_nb.runs.profiles import TASKS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    os.environ["GRPO_NB_RUNS"] = tempfile.mkdtemp()
    settings = dict(map(parse_assignment, options.set))
    for task in options.tasks:
        run = run_pipeline(task, "tiny-cpu", {"task": task, "data.eval_share": 0.32, **settings})
        report = read_json(run / "eval/report.json")
        for decoding in ("greedy", "sampled"):
            before, after = (report[decoding][name] for name in ("base", "merged"))
            changes = [
                f"{key} {before[key]:.3f} -> {after[key]:.3f}"
                for key in ("accuracy", "format")
                if after[key] is not None
            ]
            print(f"{task:<16} {decoding:<8}", *changes, sep="  ")
        seconds = {stage: entry["seconds"] for stage, entry in run.manifest().items()}
        print(f"{task:<16} {sum(seconds.values()):.0f} s, of training {seconds['03']:.0f} s")


if __name__ == "__main__":
    main()
