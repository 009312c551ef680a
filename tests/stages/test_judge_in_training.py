"""A judge over HTTP while the tiny model trains: what its failures cost, and what is noticed."""

import pandas as pd
import pytest
import scripted_judges as scripts
from judge_server import serving
from trainings import MATH, comparable, make_run, trainer_of

from grpo_nb.rewards import GroupJudge, reward_set

SHORT = {"grpo.max_steps": 4, "train.eval_steps": 0, "grpo.save_steps": 100}


@pytest.fixture
def server(runs_dir):
    with serving() as server:
        server.script = [scripts.honest]
        yield server


def train(server, run, watch=None, **fields):
    fields = {"retries": 0, "cache": False} | fields
    judge = GroupJudge("m", server.url, **fields)
    trainer = trainer_of(run, chosen=reward_set([*MATH.pairs, (judge, 0.5)], MATH))
    trainer.monitor.watchers += [watch] if watch else []
    trainer.train()


def rows_of(run):
    """The prompts of each completion, step after step."""
    files = sorted((run / "train/completions").glob("*.parquet"))
    prompts = pd.concat(map(pd.read_parquet, files))["prompt"]
    return [prompt[-1]["content"] for prompt in prompts]


def test_a_judge_that_is_down_costs_no_step_and_no_data(server):
    whole, run = make_run("whole", **SHORT), make_run("interrupted", **SHORT)
    train(server, whole)

    def falls_silent(update):
        if update.line["step"] == 2:
            server.script = [500]

    with pytest.raises(RuntimeError, match="group_judge gave no score for 16 of 16") as stop:
        train(server, run, falls_silent)
    assert "is kept up to step 2" in str(stop.value.__notes__)
    assert (run / "train/checkpoint-2").is_dir()
    with pytest.raises(RuntimeError, match="gave no score"):  # it is still down
        train(server, run)
    server.script = [scripts.honest]
    train(server, run)
    assert comparable(run)[:2] == comparable(whole)[:2]
    assert [line["step"] for line in comparable(run)] == [1, 2, 3, 4]
    assert rows_of(run) == rows_of(whole), "the step that failed is trained, with its own rows"
    assert (run / "train/adapter").is_dir()


def test_up_to_the_set_rate_a_failure_is_none_and_the_training_goes_on(server):
    run = make_run("limping", **SHORT)
    server.script = [500, scripts.honest]  # the first group of the first step
    train(server, run, max_none_share=0.5)
    assert [line["group_judge/failures"] for line in comparable(run)] == [8.0, 0.0, 0.0, 0.0]
