"""Does a real language model learn on a laptop, and is it GRPO that teaches it?

    make .venv/smollm2/config.json
    python benchmarks/real.py .venv/smollm2 --tasks json_extraction --seeds 0 1 2

Each seed is a full run of the four notebooks with the profile smollm2-cpu, and a placebo of it
whose rewards are shuffled within each group. A line holds the share of right greedy answers on the
held-out rows: of the base, after the SFT warm-up, after GRPO, and after the placebo; and the gain
of GRPO over the warm-up with its 95 % interval. A run that is done is not run again.
"""

import argparse

from grpo_nb.files import read_json
from grpo_nb.pipeline.caused import run_placebo
from grpo_nb.pipeline.notebooks import StageFailed, run_pipeline
from grpo_nb.runs import Run


def measure(model: str, task: str, seed: int, placebo: bool) -> str:
    """Return one line of the table."""
    settings = {"model.model_name": model, "task": task, "seed": seed}
    run = Run(f"real-{task}-{seed}")
    if run.undone():
        run_pipeline(run.name, "smollm2-cpu", settings)
    report = read_json(run / "eval/report.json")
    shares = [report["greedy"][label]["accuracy"] for label in ("base", "warm-up", "merged")]
    pair = next(
        line
        for line in report["comparisons"]
        if (line["before"], line["after"]) == ("warm-up", "merged")
    )
    gain = pair["differences"]["accuracy"]
    low, high = (f"{100 * end:+.1f}" for end in gain["interval"])
    seconds = sum(entry["seconds"] for entry in run.manifest().values())
    cells = [task, str(seed), *(f"{share:.1%}" for share in shares), f"{low} … {high}"]
    cells.append(_placebo(run) if placebo else "–")
    return f"| {' | '.join(cells)} | {seconds / 60:.1f} |"


def _placebo(run: Run) -> str:
    try:
        placebo = run_placebo(run.name, "shuffled", force=True)
    except StageFailed as error:
        return f"stopped: {str(error).splitlines()[0]:.60}"
    return f"{read_json(placebo / 'eval/report.json')['greedy']['merged']['accuracy']:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="folder of the model")
    parser.add_argument("--tasks", nargs="+", default=["json_extraction"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--no-placebo", action="store_true")
    given = parser.parse_args()
    header = "base | after warm-up | after GRPO | GRPO's gain [points] | placebo | minutes"
    lines = [f"| task | seed | {header} |", "|---" * 8 + "|"]
    for task in given.tasks:
        for seed in given.seeds:
            lines.append(measure(given.model, task, seed, not given.no_placebo))
            print(*lines, sep="\n", flush=True)


if __name__ == "__main__":
    main()
