"""A healthy training of the tiny model and four spoiled ones, for docs/reading-a-run.md.

    python benchmarks/spoiled_runs.py            # notebooks 1 to 3 five times, on the CPU
    python benchmarks/spoiled_runs.py hacking    # one of them

Each is a run like any other: runs/spoiled-<name>/train has its metrics.jsonl and health.jsonl.
All are forced, for notebook 2 refuses two of the reward sets; the table says with which words.
The curves, with a dashed line at each alert, go to docs/images/<name>.png.
"""

import argparse
import json
from typing import Any

import yaml

from grpo_nb import training, views
from grpo_nb.pipeline.notebooks import StageFailed, run_pipeline
from grpo_nb.rewards import gated, numeric_correctness_reward, soft_format_reward
from grpo_nb.rewards.forms import FORMS
from grpo_nb.runs import PROJECT_ROOT, Run, runs_root

# Pays only a right answer in a box, which the base never writes.
all_or_nothing_reward = gated(
    numeric_correctness_reward,
    by=soft_format_reward.configured(form=FORMS["boxed"]),
    name="all_or_nothing_reward",
)
# Meant to save tokens; but a whole answer takes 27 of them, and nothing at all is cheapest.
BRIEF = {"reward": "max_length_penalty", "name": "brevity_penalty", "weight": 8.0}
BRIEF["arguments"] = {"maximum": 16}
HARSH = [{"reward": f"{__file__}:all_or_nothing_reward"}]
COMMON = {"train.max_steps": 60, "train.eval_steps": 10, "rewards.baseline_prompts": 16}
# name: what is set, the reward set (none: the preset), the alert that is meant for it
RUNS: dict[str, tuple[dict[str, Any], Any, str]] = {
    "healthy": ({}, None, ""),
    "collapse": ({"train.learning_rate": 0.02}, None, "collapse"),
    "hacking": ({}, {"extends": "math", "rewards": [BRIEF]}, "reward hacking"),
    "harsh": ({}, HARSH, "nothing learnt"),
    "truncation": ({"train.max_completion_length": 20}, None, "truncation"),
}
SHOWN = ("reward", "rewards/{first}/mean", "eval/accuracy", "completions/mean_length")
SHOWN += ("frac_reward_zero_std", "completions/clipped_ratio", "entropy", "grad_norm")


def train(name: str) -> Run:
    """Notebooks 1 to 3 in runs/spoiled-<name>; what is there already is trained again."""
    settings, rewards, _ = RUNS[name]
    settings = COMMON | settings | {"train.resume": "never"}
    if rewards:
        path = runs_root() / f"spoiled-{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(rewards), encoding="utf-8")
        settings["rewards.preset"] = str(path)
    try:
        run_pipeline(f"spoiled-{name}", "tiny-cpu", settings, last="03", force=True)
    except StageFailed as error:  # notebook 3 says so where no step had a gradient
        print(f"{name}: {error}")
    return Run(f"spoiled-{name}")


def draw(run: Run, lines: list[dict], alerts: list[dict], first: str) -> None:
    """The charts of this page, with a line where an alert came."""
    keys = [key.format(first=first) for key in SHOWN]
    figure = views.training_charts(run, lines, keys)
    for axis in figure.axes:
        for alert in alerts:
            axis.axvline(alert["step"], color="#dd3333", linestyle="--", linewidth=0.8)
    path = PROJECT_ROOT / f"docs/images/{run.name.removeprefix('spoiled-')}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100)


def line(name: str, run: Run) -> tuple[str, bool]:
    """Its line of the table, and whether the alert meant for it came; for healthy: none."""
    lines = training.read_lines(run / "train/metrics.jsonl")
    alerts = training.read_lines(run / "train/health.jsonl")
    report = json.loads((run / "rewards/report.json").read_text(encoding="utf-8"))
    draw(run, lines, alerts, next(iter(report["weights"])))
    rewards = [one["reward"] for one in lines if "reward" in one]
    right = [one["eval/accuracy"] for one in lines if "eval/accuracy" in one]
    raised = ", ".join(f"{a['rule']} ({a['step']})" for a in alerts) or "none"
    gate = "passed" if report["passed"] else f"refused: {report['failures'][-1]}"
    text = f"| {name} | {raised} | {rewards[0]:.2f} → {rewards[-1]:.2f} "
    meant = RUNS[name][2]
    found = meant in [a["rule"] for a in alerts] if meant else not alerts
    return f"{text}| {right[0]:.0%} → {right[-1]:.0%} | {gate} |", found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RUNS))
    names = parser.parse_args().names or list(RUNS)
    if unknown := set(names) - set(RUNS):
        parser.error(f"no such run: {', '.join(unknown)}; there are {', '.join(RUNS)}")
    lines = {name: line(name, train(name)) for name in names}
    print("| run | alerts (step) | reward first → last | validation first → last | the gate |")
    print("|---|---|---|---|---|")
    print(*(text for text, _ in lines.values()), sep="\n")
    if missed := [name for name, (_, found) in lines.items() if not found]:
        raise SystemExit(f"without the alert meant for it, or with one where none is: {missed}")


if __name__ == "__main__":
    main()
