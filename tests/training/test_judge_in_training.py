"""A judge over HTTP while the tiny model trains: what its failures cost, and what is noticed."""

import numpy as np
import pandas as pd
import pytest
import scripted_judges as scripts
from judge_server import serving
from trainings import MATH, comparable, make_run, trainer_of

from grpo_nb import reward_lab
from grpo_nb.rewards import GroupJudge, LLMJudge, reward_set
from grpo_nb.training import health, judges

SHORT = {"train.max_steps": 4, "train.eval_steps": 0, "train.save_steps": 100}


@pytest.fixture
def server(runs_dir):
    with serving() as server:
        server.script = [scripts.honest]
        yield server


def judge_of(server, **fields):
    return GroupJudge("m", server.url, **{"retries": 0, "cache": False} | fields)


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
    with pytest.raises(RuntimeError, match="group_judge gave no score for 16 of 16") as stop:
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
    server.script = [500, scripts.honest]  # the first group of the first step
    trainer_with(judge_of(server, max_none_share=0.5), run).train()
    failures = [line["group_judge/failures"] for line in comparable(run)]
    assert failures == [8.0, 0.0, 0.0, 0.0]


def test_a_spent_budget_stops_with_a_checkpoint_and_a_larger_one_goes_on(server):
    run = make_run("budget", **SHORT)
    trainer = trainer_with(judge_of(server, max_calls=5), run)  # 2 a step
    with pytest.raises(RuntimeError, match="has spent its max_calls = 5"):
        trainer.train()
    assert (run / "train/checkpoint-2").is_dir() and len(server.seen) <= 5
    trainer_with(judge_of(server, max_calls=5), run).train()  # a new process has the whole budget
    assert [line["step"] for line in comparable(run)] == [1, 2, 3, 4]


def test_outside_of_a_training_a_judge_that_is_down_raises_nothing(server):
    server.script = [500]
    judge = LLMJudge("m", server.url, retries=0)
    bench = reward_lab.Bench(reward_set([*MATH.pairs, (judge, 0.5)], MATH))
    rows = [{"prompt": "1 + 1?", "answer": "2"}] * 30
    assert np.isnan(bench.score(rows, [f"It is {n}" for n in range(30)])[:, -1]).all()


LONG = {"train.max_steps": 10, "train.eval_steps": 0, "train.save_steps": 100}


@pytest.fixture
def often(monkeypatch):
    """A judge is asked again every five steps, so that trainings are short."""
    monkeypatch.setattr(judges, "DRIFT_STEPS", 5)


def turned(server, script, at):
    """The script replaces the judge after so many steps."""

    def watch(update):
        if update.line["step"] == at:
            server.script = [script]

    return watch


def test_a_judge_that_is_replaced_drifts_and_an_honest_one_does_not(server, often):
    trainer = trainer_with(judge_of(server, cache=True), make_run("replaced", **LONG))
    trainer.watch(turned(server, scripts.contrary, 6))
    trainer.train()
    drifts = {
        line["step"]: line["group_judge/drift"]
        for line in comparable(trainer.stage.run)
        if "group_judge/drift" in line
    }
    assert list(drifts) == [5, 10]
    assert drifts[5] < 1e-6, "the same requests, although it remembers its verdicts"
    assert drifts[10] > 0.15
    (alert,) = [alert for alert in trainer.alerts if alert.name == "judge drifts"]
    assert alert.evidence.startswith("step 10: group_judge no longer scores completions of the")
    assert "runs" in alert.fix and "#judge-drifts" in alert.fix


def test_asking_again_costs_nothing_but_its_calls_when_the_server_is_down(server, often):
    run = make_run("dark", **LONG | {"train.max_steps": 6})
    trainer = trainer_with(judge_of(server, max_none_share=1.0), run)
    falls_silent_after(server, 4, trainer)
    trainer.train()
    lines = comparable(run)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[4]["group_judge/failures"] == 16 and not lines[4].get("group_judge/drift")
    assert not any(alert.name == "judge drifts" for alert in trainer.alerts)


def habits(scores, texts, reasons=(), groups=2, **others):
    """What the habits of a judge with these scores are, in groups of equal size."""
    judge = GroupJudge("m")
    judge.replies = {number: {"reason": reason} for number, reason in enumerate(reasons)}
    questions = [f"{n * groups // len(texts)}?" for n in range(len(texts))]
    table = {"question": questions, "completion": texts, "group_judge": scores, **others}
    figures = judges.habits(judge, list(others), pd.DataFrame(table))
    return {key.removeprefix("group_judge/"): value for key, value in figures.items()}


def test_habits_are_correlations_within_the_groups():
    """Between the groups the long texts earn less, within each of them more."""
    texts = ["a", "aaa", "aaaaa", "x" * 51, "x" * 53, "x" * 55]
    scores = [0.7, 0.8, 0.9, 0.1, 0.2, 0.3]
    assert habits(scores, texts) == {"length": pytest.approx(1)}, "no text has markup"
    marked = habits([1, 0, 1, 0], ["**a**", "bbbbb", "# aa#", "bbbbb"])
    assert marked["markup"] > 0.9 and "length" not in marked
    assert habits([0.5] * 6, texts) == {} and habits([np.nan] * 6, texts) == {}


def test_what_other_rewards_explain_is_no_habit():
    """Right answers are longer, and the judge pays for right answers."""
    texts = ["wrong", "right, and so", "wrong!", "right, as is"] * 2
    right = [0, 1, 0, 1] * 2
    noisy = [0.2, 0.8, 0.1, 0.9, 0.1, 0.9, 0.2, 0.8]
    assert habits(noisy, texts)["length"] > 0.9
    assert abs(habits(noisy, texts, right=right)["length"]) < 0.3
    lengths = [len(text) / 20 for text in texts]
    assert habits(lengths, texts, right=right)["length"] > 0.09


def test_the_judges_own_words_are_those_of_its_reasons():
    texts = ["it delves", "he reads it", "moreover", "so what"]
    figures = habits([1, 0, 1, 0], texts, ["Moreover it delves deeply"])
    assert figures["style"] > 0.9
    assert "style" not in habits([1, 0, 1, 0], texts)


def watched(curve):
    """The alerts of a judge whose habit follows a curve with noise."""
    watch = health.Watch(health.Expected({"right": (1.0, 0, 1), "group_judge": (0.5, 0, 1)}))
    noise = np.random.default_rng(0).normal(0, 0.15, len(curve))
    lines = [
        {"step": n, "reward": 0.5, "reward_std": 0.1, "group_judge/length": float(value)}
        for n, value in enumerate(curve + noise, 1)
    ]
    return [a for line in lines for a in watch.feed(line) if a.name == "judge habit"]


def test_a_habit_that_a_judge_takes_on_is_named_once():
    (alert,) = watched(np.r_[np.full(30, 0.1), np.full(30, 0.9)])
    assert "(correlation 0." in alert.evidence
    assert "the score goes with group_judge/length more than at the start" in alert.evidence
    assert 31 <= int(alert.evidence.removeprefix("step ").split(":")[0]) <= 40
    assert not watched(np.full(60, 0.3)), "as it was at the start"
    assert not watched(np.linspace(0, 0.3, 60)), "weak"
    assert not watched(np.linspace(0, -0.9, 60)), "shorter is better"


def test_the_alerts_about_judges_say_how_often_they_were_raised():
    assert "3 of 3 with one that turns to length" in health.rates("judge habit")
    for rule, counts in health.JUDGE_RATES["alerts"].items():
        assert rule in health.ALERTS and list(counts) == list(health.JUDGE_RATES["runs"])
