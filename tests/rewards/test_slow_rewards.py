"""Rewards that wait for others wait together, and what they give is what TRL makes of them in turn.

Those that have to run at once wait for each other here, and fail after WAIT seconds if they do not.
"""

import os
import threading

import pytest
import torch
from hackable import lifted
from judge_server import serving, verdict
from trainings import trainer_of

from grpo_nb import models
from grpo_nb.rewards import GroupJudge, LLMJudge, code_execution_reward, gated, reward, reward_set
from grpo_nb.rewards import soft_format_reward as form
from grpo_nb.rewards.combine import waits
from grpo_nb.rewards.contract import Scored
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve

WAIT, ROWS = 30, 6
CODE = "```python\ndef f(x):\n    return x + 1\n```"
TEXTS = [CODE, CODE.replace("1", "2"), "no code", CODE, "```python\n1 +\n```", CODE]
CHATS = [[{"role": "assistant", "content": text}] for text in TEXTS]
ROW = {"prompt": build_prompt("Add one."), "answer": "f", "tests": ["assert f(1) == 2"]}
ARGUMENTS = ([ROW] * ROWS, [ROW["prompt"]] * ROWS, CHATS, [[1, 2]] * ROWS)


def foreign(completions, **_):
    assert threading.current_thread() is threading.main_thread()
    return [float(len(one[0]["content"])) for one in completions]


@pytest.fixture(scope="module")
def policy():
    return models.load_policy(resolve("tiny-cpu"))


@pytest.fixture
def scored(policy, runs_dir):
    """(rewards) -> a function that scores TEXTS in a trainer, with the trainer."""

    def build(*rewards):
        chosen = reward_set([(one, 1.0) for one in rewards])
        without = {"train.eval_steps": 0}
        trainer = trainer_of(Run("slow"), policy, chosen, rows=[ROW] * 8, **without)
        trainer.num_generations = ROWS  # the group that is scored here
        trainer.model.train()
        return lambda: trainer._calculate_rewards(*ARGUMENTS), trainer

    return build


def test_two_rewards_that_wait_run_at_once(scored, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    both = threading.Barrier(2)  # which two reach that are here at the same time

    def meets(response):
        if response == TEXTS[2]:  # one completion of each
            both.wait(WAIT)
        return 1.0

    pair = [lifted(lambda response: meets(response), name, parallel=True) for name in "ab"]
    score, trainer = scored(pair[0], form, pair[1])
    assert torch.equal(score()[:, 0], torch.ones(ROWS))
    told = trainer._metrics["train"]
    assert 0 < told["rewards/b/seconds"][0] <= told["seconds/reward"][0]
    assert {len(told[f"rewards/{n}/seconds"]) for n in trainer.reward_func_names} == {1}


@pytest.fixture
def judge_server(runs_dir):
    """A judge behind HTTP that gives 7 of 10, once it may; (judge, asked, may)."""
    asked, may = threading.Event(), threading.Event()

    def answer(body):
        asked.set()
        may.wait(WAIT)
        return verdict(7)

    with serving() as server:
        server.script = [answer]
        yield LLMJudge("m", server.url, retries=0, timeout_seconds=2 * WAIT), asked, may
        may.set()


def test_the_sandbox_runs_while_the_judge_is_asked(scored, judge_server):
    judge, asked, may = judge_server
    score, trainer = scored(code_execution_reward, judge)
    log, in_time = trainer._log_metric, []

    def log_metric(name, value):
        if name == "code_execution_reward/skipped":  # its programs have run; it has not returned
            in_time.append(asked.wait(WAIT))
            may.set()
        log(name, value)

    trainer._log_metric = log_metric
    expected = torch.tensor([[1.0, 0, 0, 1, 0, 1], [0.7] * ROWS]).T
    assert torch.equal(score(), expected)
    assert in_time == [True]


def test_scores_metrics_and_columns_are_those_of_trl_in_turn(scored, judge_server):
    from trl import GRPOTrainer

    @reward(parallel=True)
    def sometimes(response: str) -> Scored:
        return Scored(None, "not for me") if "code" in response else Scored(0.5, "fine")

    judge, _, may = judge_server
    may.set()
    rewards = (code_execution_reward, foreign, judge, sometimes, form)
    score, trainer = scored(*rewards)
    ours = score()
    told = dict(trainer._pending_extra_logs), dict(trainer._pending_metrics)
    trainer._pending_extra_logs.clear()
    trainer._pending_metrics.clear()
    trainer.reward_funcs = list(rewards)
    theirs = GRPOTrainer._calculate_rewards(trainer, *ARGUMENTS)
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
    assert ours.isnan().any()
    assert told == (dict(trainer._pending_extra_logs), dict(trainer._pending_metrics))
    assert told[0]["sometimes/reason"][2] == "not for me"


def test_a_judge_that_has_spent_its_budget_ends_the_step(scored, runs_dir):
    with serving() as server:
        judge = GroupJudge("m", server.url, max_tokens=1)
        score, _ = scored(form, judge)
        with pytest.raises(RuntimeError, match="group_judge has spent its max_tokens = 1 on 0"):
            score()
        assert not server.seen


def test_an_error_in_a_thread_ends_the_step_with_its_note(scored):
    @reward(parallel=True)
    def broken(response: str) -> float:
        raise KeyError("no such column")

    score, _ = scored(form, broken)
    with pytest.raises(KeyError, match="no such column") as caught:
        score()
    assert "in reward broken, completion" in caught.value.__notes__[0]


def test_a_reward_that_asks_another_in_its_thread_is_answered():
    """They share their threads: it must not wait for one that never gets free."""

    @reward(parallel=True)
    def outer(response: str) -> float:
        return code_execution_reward(completions=[response], tests=[ROW["tests"]])[0]

    assert outer(completions=TEXTS[:2] * 8) == [1.0, 0.0] * 8


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (code_execution_reward, True),
        (gated(code_execution_reward, by=form), True),
        (form, False),  # it computes: a thread would gain nothing
        (gated(form, by=form), False),
        (gated(code_execution_reward, by=foreign), False),  # who knows what it counts on
        (LLMJudge("m"), False),  # TRL awaits it
    ],
)
def test_which_rewards_run_in_threads(one, expected):
    assert waits(one) == expected
