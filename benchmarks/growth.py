"""How a step's cost grows with group size, completion length, model size and LoRA rank.

    python benchmarks/growth.py            # about five minutes; draws docs/images/growth.png

Models of random weights, which hardly ever end a completion: all are of full length. Each point is
a process of its own that trains STEPS steps; the first is left out, of the others the median is
taken. Memory is the most that the process held, over that of the smallest point.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from grpo_nb.machine import PROJECT_ROOT

STEPS = 4
PROMPTS = 4
# Each line: what grows, and a point for each of its values; the rest stays as in `POINT`.
POINT = {"group": 8, "tokens": 48, "hidden": 128, "rank": 16}
GROWTH = {
    "group": (2, 4, 8, 16, 32),
    "tokens": (16, 32, 64, 128, 256),
    "hidden": (128, 256, 384, 512, 640),
    "rank": (4, 16, 32, 64, 128),
}
LABELS = {
    "group": "completions per prompt",
    "tokens": "tokens per completion",
    "hidden": "parameters [million]",
    "rank": "rank of LoRA",
}
PHASES = ("generation", "update")


def step(point: dict[str, int]) -> dict[str, float]:
    """Median seconds of a step's phases, the process's memory and the model's parameters."""
    sys.path.insert(0, str(PROJECT_ROOT / "data"))
    import tiny_model

    from grpo_nb import data, models, rewards, stages
    from grpo_nb.models import hub
    from grpo_nb.runs import Run, Stage
    from grpo_nb.runs.config import resolve

    with tempfile.TemporaryDirectory() as folder:
        os.environ["GRPO_NB_RUNS"] = folder
        tokenizer = hub.load_tokenizer("data/tiny_base")
        model = tiny_model.build_model(tokenizer, len(tokenizer), point["hidden"])
        model.save_pretrained(Path(folder) / "model")
        tokenizer.save_pretrained(Path(folder) / "model")
        settings = {
            "model.model_name": str(Path(folder) / "model"),
            "lora.r": point["rank"],
            "lora.lora_alpha": 2 * point["rank"],
            "grpo.num_generations": point["group"],
            "grpo.per_device_train_batch_size": PROMPTS * point["group"],
            "grpo.max_completion_length": point["tokens"],
            "grpo.max_steps": STEPS,
            "train.eval_steps": 0,
        }
        config, run = resolve("tiny-cpu", settings), Run("benchmark")
        data.prepare_run(run, config.data, 0, lambda chats: [30] * len(chats))
        policy = models.load_policy(config)
        stage, chosen = Stage(run, "03", config), rewards.load_preset("math")
        trainer = stages.build_trainer(policy, chosen, data.load(run, "train"), stage)
        trainer.train()
    lines = [line for line in trainer.state.log_history if "seconds/update" in line][1:]
    found = {name: statistics.median(x[f"seconds/{name}"] for x in lines) for name in PHASES}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return found | {"gib": peak, "parameters": sum(p.numel() for p in model.parameters())}


def measured(point: dict[str, int]) -> dict[str, float]:
    """`step`, in a process of its own."""
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def _both(*axes: Any) -> tuple[list[Any], list[str]]:
    """What the legends of two axes would show, in one."""
    known = [axis.get_legend_handles_labels() for axis in axes]
    return [one for of, _ in known for one in of], [name for _, of in known for name in of]


def draw(found: dict[str, list[dict[str, float]]], path: Path) -> None:
    """A picture for each thing that grows: seconds of the phases, and memory."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6), layout="constrained")
    least = min(one["gib"] for line in found.values() for one in line)
    for axis, (name, line) in zip(figure.subplots(2, 2).flat, found.items(), strict=True):
        places = [one["parameters"] / 1e6 for one in line] if name == "hidden" else GROWTH[name]
        axis.stackplot(places, *[[one[p] for one in line] for p in PHASES], labels=PHASES)
        most = max(sum(one[p] for p in PHASES) for one in line)
        axis.set(xlabel=LABELS[name], ylabel="seconds a step", ylim=(0, 1.4 * most))
        memory = axis.twinx()
        memory.plot(places, [one["gib"] - least for one in line], "k.--", label="memory")
        gained = max(one["gib"] for one in line) - least
        memory.set(ylabel="memory beyond the least [GiB]", ylim=(0, 1.4 * gained))
        axis.legend(*_both(axis, memory), loc="upper left", frameon=False, ncols=3)
    figure.savefig(path, dpi=90)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", default=str(PROJECT_ROOT / "docs/images/growth.png"))
    parser.add_argument("--point", default="", help="internal: what this process measures")
    arguments = parser.parse_args()
    if arguments.point:
        return print(json.dumps(step(json.loads(arguments.point))))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| what grows | value | generation [s] | update [s] | memory [GiB] |")
    print("|---|---|---|---|---|", flush=True)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in GROWTH}
    for name, values in GROWTH.items():
        for value in values:
            one = measured(POINT | {name: value})
            found[name].append(one)
            text = f"{one['generation']:.2f} | {one['update']:.2f} | {one['gib']:.2f}"
            print(f"| {name} | {value} | {text} |", flush=True)
    Path(arguments.to).parent.mkdir(exist_ok=True)
    draw(found, Path(arguments.to))


if __name__ == "__main__":
    main()
