"""A judge over HTTP while the tiny model trains: what its failures cost, and what is noticed."""

import numpy as np
import pandas as pd
import pytest
import scripted_judges as scripts
from judge_server import serving
from trainings import MATH, comparable, make_run, trainer_of

from grpo_nb import reward_lab
from grpo_nb.rewards import LLMJudge, reward_set

SHORT = {"grpo.max_steps": 4, "train.eval_steps": 0, "grpo.save_steps": 100}


@pytest.fixture
def server(runs_dir):
    with serving() as server:
        server.script = [scripts.honest]
        yield server


def judge_of(server, **fields):
    return LLMJudge("m", server.url, **{"retries": 0, "cache": False} | fields)


def trainer_with(judge, run):
    return trainer_of(run, chosen=reward_set([*MATH.pairs, (judge, 0.5)], MATH))


def rows_of(run):
    """The prompts of each completion, step after step."""
    files = sorted((run / "train/completions").glob("*.parquet"))
    prompts = pd.concat(map(pd.read_parquet, files))["prompt"]
    return [prompt[-1]["content"] for prompt in prompts]


def falls_silent_after(server, steps, trainer):
    """The server answers 500 to whatever is asked after so many steps."""

    def watch(update):
        if update.line["step"] == steps:
            server.script = [500]

    trainer.watch(watch)


def test_a_judge_that_is_down_costs_no_step_and_no_data(server):
    whole = make_run("whole", **SHORT)
    trainer_with(judge_of(server), whole).train()
    run = make_run("interrupted", **SHORT)
    trainer = trainer_with(judge_of(server), run)
    falls_silent_after(server, 2, trainer)
    with pytest.raises(RuntimeError, match="llm_judge gave no score for 16 of 16") as stop:
        trainer.train()
    assert "is kept up to step 2" in str(stop.value.__notes__)
    assert (run / "train/checkpoint-2").is_dir()
    with pytest.raises(RuntimeError, match="gave no score"):  # it is still down
        trainer_with(judge_of(server), run).train()
    server.script = [scripts.honest]
    trainer_with(judge_of(server), run).train()
    assert comparable(run)[:2] == comparable(whole)[:2]
    assert [line["step"] for line in comparable(run)] == [1, 2, 3, 4]
    assert rows_of(run) == rows_of(whole), "the step that failed is trained, with its own rows"
    assert (run / "train/adapter").is_dir()


def test_up_to_the_set_rate_a_failure_is_none_and_the_training_goes_on(server):
    run = make_run("limping", **SHORT)
    server.script = [500, scripts.honest]  # one completion of the first step
    trainer_with(judge_of(server, max_none_share=0.5), run).train()
    failures = [line["llm_judge/failures"] for line in comparable(run)]
    assert 0 < failures[0] <= 8 and failures[1:] == [0.0, 0.0, 0.0]


def test_outside_of_a_training_a_judge_that_is_down_raises_nothing(server):
    server.script = [500]
    judge = LLMJudge("m", server.url, retries=0)
    bench = reward_lab.Bench(reward_set([*MATH.pairs, (judge, 0.5)], MATH))
    rows = [{"prompt": "1 + 1?", "answer": "2"}] * 30
    assert np.isnan(bench.score(rows, [f"It is {n}" for n in range(30)])[:, -1]).all()
