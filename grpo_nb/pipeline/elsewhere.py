"""Write a run's held-out rows as a task of lm-eval and of Inspect.

    write_task(runs.Run("mine"))    # runs/mine/eval_task: lm_eval.yaml, inspect_eval.py, rows.jsonl

The run's rewards score the answers, so that a model has the same figures there and in stage 04.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_nb import data
from grpo_nb.evaluation.evaluate import score_rows
from grpo_nb.evaluation.report import with_accuracy
from grpo_nb.files import atomic_path, read_yaml
from grpo_nb.models import Sample, load_tokenizer
from grpo_nb.models.template import turn_end
from grpo_nb.reward_lab import bench_of
from grpo_nb.rewards import load_rewards
from grpo_nb.runs import Run
from grpo_nb.runs.config import read

ROLES = ("system", "user", "assistant")
TEXTS = read_yaml(Path(__file__).with_name("elsewhere.yaml"))


def write_task(run: Run) -> Path:
    """Write the folder eval_task of a run that has a merged model, and return it.

    Raises:
        ValueError: Prompts differ in more than their last turn.
    """
    rows, config, folder = data.load(run, "eval"), run.config(), run / "eval_task"
    befores = [row["prompt"][:-1] for row in rows]
    turns = {role: [t["content"] for t in befores[0] if t["role"] == role] for role in ROLES}
    worked = list(zip(turns["user"], turns["assistant"], strict=True))
    if any(before != befores[0] for before in befores):
        raise ValueError(
            f"the prompts of run {run.name!r} differ in more than their last turn: a task holds "
            "one question each, after the same system prompt and worked turns"
        )
    lines = [{"question": row["prompt"][-1]["content"], "row": json.dumps(row)} for row in rows]
    texts = {
        **{"name": json.dumps(run.name), "folder": json.dumps(str(folder))},
        "system": json.dumps("".join(turns["system"])),
        "tokens": config.grpo.max_completion_length,
        "end": json.dumps(turn_end(load_tokenizer(str(run / "model/merged"))).strip()),
        "count": len(worked),
        "shots": json.dumps([{"question": ask, "answer": answer} for ask, answer in worked]),
    }
    with atomic_path(folder) as new:
        new.mkdir()
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (new / "rows.jsonl").write_text(text, encoding="utf-8")
        for name, text in TEXTS.items():
            (new / name).write_text(text.format(**texts), encoding="utf-8")
    return folder


def scorer(folder: Path) -> Callable[[Mapping[str, Any], str], dict[str, float]]:
    """Return a function that scores an answer to a row.

    It takes a line of rows.jsonl and the answer, and returns {"correct": …, "reward": …}.

    Args:
        folder: A run's eval_task.
    """
    config = read(folder.parent / "config.yaml")
    bench = bench_of(config, load_rewards(config.rewards))

    def score(line: Mapping[str, Any], answer: str) -> dict[str, float]:
        table = score_rows([json.loads(line["row"])], [[Sample(answer, 0, False)]], bench)
        [lines] = with_accuracy({"": table}, bench.preset).values()
        return {name: float(lines[name].iloc[0]) for name in ("correct", "reward")}

    return score
