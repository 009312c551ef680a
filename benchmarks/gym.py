"""Which tasks of reasoning-gym are fit for GRPO? Figures for docs/gym.md.

    python benchmarks/gym.py table                 check_rewards on each task, into docs/gym.md
    python benchmarks/gym.py model FOLDER [TASK…]  pass@8 of a model at the easiest sizes
    python benchmarks/gym.py learn FOLDER TASK SEED [OPTIONS] [SETTING=VALUE…] [--placebo]
                                                   what GRPO alone teaches it, in runs/gym-*

`table` judges the task's scorer by `check_rewards`, times its generator, and measures what a part
of the points pays for wrong answers. `model` samples 8 completions for each of 16 held-out prompts
with two worked turns, and counts what the strict reward pays; it prints a line once a task is done.
`learn` trains for 30 steps of 32 completions, without a warm-up, and compares base and adapter on
160 held-out rows, or 40 % of all; with `--placebo` it trains again with scores shuffled within
their groups.
"""

import io
import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
import placebo
import yaml

import grpo_nb
from grpo_nb.data.gym import NAME, REFUSED, of_level
from grpo_nb.pipeline.notebooks import assigned
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.gym import library
from grpo_nb.runs import Run
from grpo_nb.stats import pass_at_k

PAGE = Path(__file__).parents[1] / "docs/gym.md"
ROWS, SLOW = 24, 0.1  # rows of each task; seconds of the processor for one, of a slow generator
WORDS = {"several answers": "hedging", "empty form": "a constant", "part of a number": "near miss"}
PLAIN = "|  |  |  |"  # the end of a line that says nothing
HARSH = "spelling"  # the finding that a right answer, written otherwise, earns nothing


def tasks() -> list[str]:
    return sorted(set(library().factory.DATASETS) - {"composite"})


def stops(rows: list[dict[str, Any]], preset: str) -> tuple[list[str], bool]:
    """Return what a policy would be paid for although it is wrong, and whether it is harsh."""
    rewards = load_preset(preset)
    form = rewards.form.write("{reasoning}", "{answer}")
    verdict = grpo_nb.check_rewards(rewards.reward_funcs, rows, form=form)
    names = [
        WORDS.get(check.name, check.name) for check in verdict.findings if check.state == "stop"
    ]
    return list(dict.fromkeys(names)), any(check.name == HARSH for check in verdict.findings)


def credit(rows: list[dict[str, Any]]) -> list[str]:
    """Return what `gym_partial` pays for "the reference or another", and for another row's answer.

    It is the larger of the two means; [] if they are near 0.
    """
    reward = load_preset("gym_partial").correct_func
    answers = [row["answer"] for row in rows]
    others = [next((a for a in answers if a != own), "") for own in answers]
    hedges = [f"{own} or {other}" for own, other in zip(answers, others, strict=True)]
    columns = {name: [row[name] for row in rows] for name in ("answer", "entry")}
    means = []
    for texts in (hedges, others):
        completions = [f"<answer>{text}</answer>" for text in texts]
        means.append(np.nanmean(np.array(reward(completions, **columns), float)))
    return [f"{max(means):.2f}"] if max(means) >= 0.05 else []


def line(task: str) -> str:
    """Return the table's line of one task."""
    if task in REFUSED:
        return f"| {task} | refused | | {REFUSED[task]} |"
    start = time.process_time()
    try:
        rows = grpo_nb.prepare(f"{NAME}{task}", max_rows=ROWS).rows["train"]
    except ValueError as error:
        return f"| {task} | refused | | {str(error).splitlines()[0][:160]} |"
    seconds = (time.process_time() - start) / ROWS
    strict, harsh = stops(rows, "gym")
    notes = [f"slow: {seconds:.1f} s"] * (seconds > SLOW) + ["harsh"] * harsh
    cells = [", ".join(each) for each in (strict, credit(rows), notes)]
    return f"| {task} | {' | '.join(cells)} |"


def table() -> None:
    lines = []
    for task in tasks():
        with redirect_stdout(io.StringIO()):
            lines.append(line(task))
        print(lines[-1], flush=True)
    text = PAGE.read_text(encoding="utf-8")
    head, rule, _ = text.partition("\n|---|---|---|---|\n")  # another table has more columns
    plain = [each.split()[1] for each in lines if each.endswith(PLAIN)]
    rows = "".join(f"{each}\n" for each in lines if not each.endswith(PLAIN))
    text = fill(f"Nothing of this holds for {', '.join(plain)}.", 106, break_on_hyphens=False)
    PAGE.write_text(f"{head}{rule}{rows}\n{text}\n", encoding="utf-8")


def easiest(task: str) -> dict[str, Any]:
    """Return the options of the first level of a task's curriculum; {} if it has none."""
    return of_level(task, 1) if library().factory.has_curriculum(task) else {}


def measured(folder: str, names: list[str]) -> Iterator[str]:
    """Yield a line for each task: pass@1, pass@8 and the share of the best constant answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer, preset = AutoTokenizer.from_pretrained(folder), load_preset("gym")
    reward = preset.correct_func
    for task in names:
        try:
            options = {"options": easiest(task), "shots": 2, "max_prompt_tokens": 400}
            made = grpo_nb.prepare(f"{NAME}{task}", tokenizer, max_rows=82, eval_rows=16, **options)
        except (ValueError, AssertionError) as error:
            yield f"| {task} | | | {str(error).splitlines()[0][:120]} |"
            continue
        rows = made.rows["eval"]
        groups = grpo_nb.sample(model, tokenizer, rows, max_completion_length=24)
        right = np.array(
            [
                reward([text], answer=[row["answer"]], entry=[row["entry"]])[0] == 1
                for row, group in zip(rows, groups, strict=True)
                for text in group
            ]
        ).reshape(len(rows), -1)
        figures = (right.mean(), pass_at_k(right, 8).mean())
        answers = [row["answer"] for row in rows]
        share = max(map(answers.count, answers)) / len(answers)
        yield f"| {task} | {figures[0]:.2f} | {figures[1]:.2f} | constant {share:.2f} |"


def learnt(name: str) -> dict[str, Any]:
    """Return what a run's adapter and its base answer right, and the paired difference."""
    report = json.loads((Run(name) / "eval/report.json").read_text())
    [pair] = report["comparisons"]
    change = pair["differences"]["accuracy"]
    points = [round(100 * each, 1) for each in (change["difference"], *change["interval"])]
    shares = {label: round(100 * each["accuracy"], 1) for label, each in report["greedy"].items()}
    steps = pd.read_json(Run(name) / "train/metrics.jsonl", lines=True)
    signal = round(100 * (1 - steps["frac_reward_zero_std"].mean()))  # % of the groups
    gain = {"points": points, "p": round(pair["mcnemar_p"], 4), "signal": signal}
    return {"run": name, **shares, **gain}


def learn(folder: str, task: str, seed: str, options: str, more: list[str], kind: str) -> None:
    settings = {
        **{"task": "gym", "data.source": f"{NAME}{task}", "model.model_name": folder},
        **{"data.options": yaml.safe_load(options) if options else easiest(task)},
        **{"seed": int(seed), "train.eval_steps": 0, "data.max_prompt_tokens": 400},
        **{"data.eval_rows": 160, "data.eval_share": 0.4},
    }
    settings |= assigned(more)
    name = "-".join(["gym", task, seed, *(each.partition("=")[2] for each in more)])
    if Run(name).undone():
        placebo.prepare(name, settings, "smollm2-cpu")
        placebo.train(name, settings)
        placebo.evaluate(name, settings)
    print(json.dumps(learnt(name)), flush=True)
    if kind:
        other = f"{name}-{kind}"
        placebo.prepare(other, settings, "smollm2-cpu")
        placebo.train(other, settings | {"train.placebo": kind})
        placebo.evaluate(other, settings)
        print(json.dumps(learnt(other)), flush=True)


def main() -> None:
    match sys.argv[1:]:
        case ["learn", folder, task, seed, *more]:
            kind = "shuffled" if "--placebo" in more else ""
            options = "".join(each for each in more if each[0] == "{")
            more = [each for each in more if "=" in each and each[0] != "{"]
            learn(folder, task, seed, options, more, kind)
        case ["table"]:
            table()
        case ["model", folder, *names]:
            for each in measured(folder, names or [t for t in tasks() if t not in REFUSED]):
                print(re.sub(r"\s+", " ", each), flush=True)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
