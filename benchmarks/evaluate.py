"""How long an evaluation of three models takes, and how often its intervals hold.

    python benchmarks/evaluate.py            # needs a finished run named "demo"; about 2 minutes

Speed: base, adapter and merged model of the run on 512 prompts, greedy and `evaluate.samples`
sampled; where fewer are held out, training rows fill up, for only the time counts.
Coverage: 1,000 draws of two models that find the same prompts hard.
"""

import argparse
import time
from statistics import NormalDist

import numpy as np

from grpo_nb import data, evaluate, evaluation
from grpo_nb.runs import Run
from grpo_nb.stats import bootstrap

PROMPTS, DRAWS = 512, 1000


def seconds(run: Run) -> dict[str, float]:
    """Seconds of each model, and of all with the report."""
    config = run.config()
    model, rows = config.model, [*data.load(run, "eval"), *data.load(run, "train")][:PROMPTS]
    name = model.model_name
    compared = {"base": name, "adapter": (name, run / "train/adapter")}
    compared["merged"] = run / "model/merged"
    started = time.perf_counter()
    report = evaluate(compared, rows, **evaluation.options(config)).report
    parts = {label: about["seconds"] for label, about in report["models"].items()}
    return {**parts, "in all": time.perf_counter() - started}


def coverage(prompts: int, before: float, after: float) -> float:
    """Share of draws in which the 95 % interval of the difference holds the true one."""
    rng = np.random.default_rng(prompts)
    shared = rng.normal(size=(prompts, DRAWS))
    first, second = (
        shared + rng.normal(size=shared.shape) < 2**0.5 * NormalDist().inv_cdf(accuracy)
        for accuracy in (before, after)
    )
    ends = np.outer([-0.5, 0.5], np.ones(DRAWS))
    low, high = bootstrap(second.astype(float) - first, ends)
    truth = after - before
    return float(((low <= truth + 1e-9) & (truth - 1e-9 <= high)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", default="demo")
    for part, taken in seconds(Run(parser.parse_args().run)).items():
        print(f"{part:<8} {taken:6.1f} s", flush=True)
    print("| accuracy | " + " | ".join(f"n = {n}" for n in (64, 128, 256, 512)) + " |")
    print("|---|---|---|---|---|")
    for pair in ((0.3, 0.3), (0.3, 0.9), (0.3, 0.98), (0.9, 0.9), (0.9, 0.98), (0.98, 0.98)):
        shares = " | ".join(f"{coverage(n, *pair):.1%}" for n in (64, 128, 256, 512))
        print(f"| {pair[0]:.0%} → {pair[1]:.0%} | {shares} |")


if __name__ == "__main__":
    main()
