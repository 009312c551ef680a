"""The log of completions names images by their digests."""

import pandas as pd
from pictures import FORM, ROWS, seen
from trainings import MATH

from grpo_nb import stages
from grpo_nb.rewards.prompts import in_parts
from grpo_nb.runs import Run


def test_the_log_holds_no_image_and_the_monitor_has_each(start):
    trainer = start(**{"train.eval_steps": 0, "grpo.max_steps": 1})
    trainer.train()
    run, updates = Run("here"), []
    logs = trainer._logs
    texts = logs["prompt"], logs["completion"], logs["advantages"]
    for lines in (*texts, *logs["rewards"].values(), logs["extra"]):
        lines.clear()
    for row in ROWS[::-1]:  # as TRL fills it in at the end of a step
        logs["prompt"].append(in_parts(row["prompt"]))
        logs["completion"].append([{"role": "assistant", "content": FORM.format(row["answer"])}])
        logs["images"].append(row["images"])
        logs["advantages"].append(0.0)
        for name in MATH.names:
            logs["rewards"][name].append(1.0)
    trainer.monitor.watchers.append(updates.append)
    trainer.log({"loss": 0.1, "reward": 1.0})
    [path] = (run / "train/completions").glob("*.parquet")
    assert path.stat().st_size < 20_000 and b"\x89PNG" not in path.read_bytes()
    assert "PIL" not in pd.read_parquet(path).to_string()
    table = stages.read_completions(run, MATH)
    assert set(table["question"]) == {"Which color?"}
    [update] = updates
    assert [record["question"] for record in update.completions] == ["Which color?"] * len(ROWS)
    answers = [seen(record["images"][0]) for record in update.completions]
    assert answers == [row["answer"] for row in ROWS[::-1]]
