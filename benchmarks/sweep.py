"""What a sweep costs beside its trials, and a run beside the work of its notebooks.

    python benchmarks/sweep.py

runs 20 stand-in trials of one second, which cost nothing but that, and one tiny run. A stage's own
work is the time in its cells; starting kernels, and checks are the rest.
"""

import json
import os
import tempfile
import time
from pathlib import Path

from grpo_nb.pipeline.notebooks import run_pipeline
from grpo_nb.pipeline.sweep import read_sweep, run_sweep
from grpo_nb.runs import NOTEBOOKS, Run

TRIALS, SECONDS = 20, 1.0
SETTINGS = {"data.eval_rows": 64, "rewards.baseline_prompts": 4, "grpo.max_steps": 20}
DONE = json.dumps({stage: {"status": "done"} for stage in NOTEBOOKS})
SLEEP = f"mkdir -p $0 && echo '{DONE}' > $0/manifest.json && exec sleep {SECONDS}"


def seconds_a_trial(folder: Path) -> float:
    """What one trial of a sweep takes longer than by itself [s]."""
    (folder / "s.yaml").write_text(f"profile: tiny-cpu\ngrid: {{seed: {list(range(TRIALS))}}}\n")
    asked = read_sweep(folder / "s.yaml")
    started = time.perf_counter()
    run_sweep(asked, lambda _, t: ["sh", "-c", SLEEP, str(folder / t.name)])
    return (time.perf_counter() - started) / TRIALS - SECONDS


def in_cells(run: Run) -> float:
    """Time in the cells of the executed notebooks, as papermill stored it [s]."""
    total = 0.0
    for name in NOTEBOOKS.values():
        notebook = json.loads((run / f"notebooks/{name}.ipynb").read_text(encoding="utf-8"))
        cells = [cell["metadata"].get("papermill", {}) for cell in notebook["cells"]]
        total += sum(cell.get("duration") or 0 for cell in cells)
    return total


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        more = seconds_a_trial(Path(folder))
        started = time.perf_counter()
        run_pipeline("one", "tiny-cpu", SETTINGS)
        whole = time.perf_counter() - started
        own = in_cells(Run("one"))
    print(f"sweep: {more:.3f} s a trial, {more / whole:.2%} of a run of {whole:.0f} s")
    print(f"run: {whole:.1f} s, of them {own:.1f} s in cells; the pipeline {whole - own:.1f} s")


if __name__ == "__main__":
    main()
