"""The task sets: what the scripts write, rewarded as meant, unseen by the base."""

import json
import random

import numpy as np
import pytest

from grpo_nb.files import project_path
from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt

TASKS = ("code", "summarization", "qa", "json_extraction")
each_task = pytest.mark.parametrize("task", TASKS)


def rows_of(task: str) -> list[dict]:
    system_prompt = load_preset(task).form.system_prompt
    text = project_path(f"data/tasks/{task}.jsonl").read_text(encoding="utf-8")
    rows = map(json.loads, text.splitlines())
    return [{"prompt": build_prompt(row["question"], system_prompt), **row} for row in rows]


@each_task
def test_a_set_is_what_its_script_writes(task):
    import make_tasks

    written = project_path(f"data/tasks/{task}.jsonl").read_text(encoding="utf-8")
    assert written == "".join(json.dumps(row) + "\n" for row in make_tasks.sample_rows(task))
    assert len({row["question"] for row in rows_of(task)}) == make_tasks.ROWS == 400
    assert set(TASKS) == set(make_tasks.TASKS)


@each_task
def test_every_gold_earns_its_rewards_in_full(task):
    preset, rows = load_preset(task), rows_of(task)
    if task == "code":  # all of them here, some in the sandbox
        for row in rows:
            exec(row["answer"], space := {})
            tests = json.loads(row["tests"])
            assert all(space[tests["function"]](*given) == out for given, out in tests["cases"])
        rows = rows[::8]
    scores = Bench(preset).score(rows, [preset.reference(row) for row in rows])
    full = [func.range[1] for func in preset.reward_funcs]
    np.testing.assert_array_equal(scores, np.tile(full, (len(rows), 1)))


@each_task
def test_the_base_never_saw_a_row(task):
    import make_task_base
    import make_tasks

    shipped, rng = make_tasks.read_questions(task), random.Random(4)
    for number in range(4000):
        prompt, _ = make_task_base.sample_chat({task: shipped}, number % 2 == 0, rng)
        question = prompt.rpartition("user\n")[2].partition("<|im_end|>")[0]
        assert question and question not in shipped
