"""Does the tiny model learn, whatever the seed? The table in docs/figures.md.

    python benchmarks/learning.py            # 5 seeds, about 3 minutes each on 2 cores

Each seed is a full run: another split, other samples, another adapter. Held-out accuracy
and format are greedy, on 256 prompts, of the base before and of the merged model after.
"""

import argparse
import json

from grpo_nb.files import read_json
from grpo_nb.pipeline.notebooks import run_pipeline


def measure(seed: int) -> dict[str, float]:
    """One run of the four notebooks; returns the figures of its line in the table."""
    run = run_pipeline(f"learning-seed{seed}", "tiny-cpu", {"seed": seed, "data.eval_share": 0.25})
    greedy = read_json(run / "eval/report.json")["greedy"]
    return {
        "seed": seed,
        "accuracy_before": greedy["base"]["accuracy"],
        "accuracy_after": greedy["merged"]["accuracy"],
        "format_before": greedy["base"]["format"],
        "format_after": greedy["merged"]["format"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    lines = [measure(seed) for seed in range(parser.parse_args().seeds)]
    print("| seed | accuracy before → after | format before → after |")
    print("|---|---|---|")
    for line in lines:
        print(
            f"| {line['seed']} | {line['accuracy_before']:.1%} → {line['accuracy_after']:.1%} "
            f"| {line['format_before']:.1%} → {line['format_after']:.1%} |"
        )
    reached = [x for x in lines if x["accuracy_after"] >= 0.75 and x["format_after"] >= 0.95]
    print(json.dumps({"reached": len(reached), "of": len(lines)}))


if __name__ == "__main__":
    main()
