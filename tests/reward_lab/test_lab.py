"""What the Reward Lab sends to the browser, and what it answers; tests/browser looks at it."""

import inspect
import json

import pytest
from hackable import ROWS
from labs import MATH, RIGHT, open_lab
from pictures import ROWS as PICTURES

from grpo_nb import RewardLab, check_rewards, views
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import Sample, load_tokenizer
from grpo_nb.reward_lab import Bench, RewardTest, bench_of, judge
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve

HEDGE = RIGHT.format("84 or 85")


def careless(completions, answer, **_):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(want in text) / len(text[:1]) for want, text in zip(answer, texts, strict=True)]


def mentions(completions, answer, **_):
    """Pay for an answer anywhere."""
    return [float(want in text) for want, text in zip(answer, completions, strict=True)]


TEXTS = [{**row, "prompt": row["question"]} for row in ROWS]


def lines(lab, **values):
    every = [*lab.data["completions"], *lab.added]
    return [line for line in every if values.items() <= line.items()]


def test_it_takes_what_check_rewards_takes_and_shows_the_same_verdict():
    taken = inspect.signature(check_rewards).parameters
    assert inspect.signature(RewardLab).parameters == taken
    lab, verdict = open_lab(careless), check_rewards(careless, ROWS, [[RIGHT.format("85"), "7"]])
    assert lab.verdict.findings == verdict.findings and lab.verdict.table == verdict.table
    assert lab.report["state"] == "stop"
    assert str(verdict).partition("(")[0] in lab.report["sentence"]
    assert [card["name"] for card in lab.report["cards"]] == [c.name for c in verdict.findings]
    json.dumps([lab.data, lab.report], allow_nan=False)


def test_the_table_has_what_was_sampled_what_is_right_and_each_attack_once():
    lab = open_lab()
    [first, second] = lines(lab, kind="sampled")
    assert first["text"] == RIGHT.format("85") and first["scores"] == [1.0, 1.0, 1.0, 1.0]
    assert first["why"][0] == "85, read as a number, is 85" and first["answer"] == "85"
    assert (first["wrong"], second["wrong"]) == (False, True) and second["answer"] == ""
    assert len(lines(lab, kind="reference")) == len(lab.data["groups"]) == len(ROWS)
    attacks = lines(lab, kind="attack")
    assert len({each["name"] for each in attacks}) == len(attacks) > 40
    assert [r["role"] for r in lab.data["rewards"]][:2] == ["right", "form"]
    assert lab.data["weights"] == MATH.reward_weights
    assert set(lab.report["won"].values()) == {""} and lab.report["state"] == "passed"


def test_a_sampled_completion_that_is_tried_as_an_attack_is_listed_once():
    def counts(completions, **_):
        return [text.count("=") / 4 for text in completions]

    spam = RIGHT.format("7").replace("1+1=2", "so = = = = =")
    sampled = [["a"], [spam, "b"], [RIGHT.format("15"), spam]]
    lab = RewardLab([mentions, counts], TEXTS, sampled, form="tags")
    assert any(level and "sampled" in name for name, level in lab.report["won"].items())
    assert [line["kind"] for line in lines(lab, text=spam)] == ["sampled"] * 2


def test_a_wrong_answer_that_a_reward_takes_for_right_is_called_wrong():
    lab = RewardLab(mentions, TEXTS, [[RIGHT.format("85"), HEDGE]], form="tags")
    assert [line["wrong"] for line in lines(lab, kind="sampled")] == [False, True]
    assert [line["scores"] for line in lines(lab, kind="sampled")] == [[1.0], [1.0]]


def test_the_card_of_an_attack_has_the_completion_that_earns_most():
    lab = open_lab([mentions], TEXTS, form="tags")
    for card in [card for card in lab.report["cards"] if "attack" in card]:
        [attack] = lines(lab, kind="attack", name=card["attack"])
        assert card["text"] == attack["text"][:600]
    card = lab.report["cards"][0]
    assert card["state"] == "stop" and "`mentions` pays 1" in card["evidence"] and card["fix"]


def test_a_completion_on_which_a_reward_raises_is_marked():
    lab = open_lab(careless)
    assert "careless: raises" in [card["name"] for card in lab.report["cards"]]
    [empty] = lines(lab, kind="empty", group=0)
    assert empty["failed"] and empty["scores"] == [None]


def test_an_edited_completion_is_scored():
    lab = open_lab()
    lab._score(lab, {"group": 0, "text": RIGHT.format("12 or 13")}, [])
    [edited] = lines(lab, kind="edited")
    assert edited["scores"][0] == 0 and edited["answer"] == "12 or 13" and edited["wrong"]


def test_advantages_are_those_of_the_run():
    lab = open_lab(args={"scale_rewards": False})
    assert lab.data["scaling"] == "none" and lab.data["aggregation"] == "sum_then_normalize"


def test_images_of_the_rows_are_sent_small():
    lab = RewardLab(load_preset("qa").reward_funcs, PICTURES[:4])
    assert [group["images"].count("<img") for group in lab.data["groups"]] == [1] * 4


@pytest.fixture
def run_test(runs_dir):
    groups = [[Sample(RIGHT.format(row["answer"]), 20, False), Sample("7", 2, True)]
              for row in ROWS[:3]]  # fmt: skip
    stage = Stage(Run("lab"), "02", resolve("tiny-cpu", {}))
    return RewardTest(stage, ROWS, Baseline(ROWS[:3], groups), Bench(load_preset("math")))


def test_notebook_2_shows_the_rewards_of_the_run(run_test):
    lab = views.lab(run_test)
    assert len(lines(lab, kind="sampled")) == 6
    findings = [check for check in judge(run_test).checks if check in lab.verdict.findings]
    assert findings == list(lab.verdict.findings)


def test_a_task_with_an_environment_is_checked_in_place_of_the_lab():
    config = resolve("tiny-cpu", {"task": "guess"})
    lines = (PROJECT_ROOT / "data/tasks/guess.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{**row, "prompt": [{"role": "user", "content": row["question"]}]}
            for row in map(json.loads, lines[:8])]  # fmt: skip
    bench = bench_of(config, load_preset("environment"), load_tokenizer("data/agent_base"))
    [sound] = views.lab(RewardTest(Stage(Run("lab"), "02", config), rows, None, bench))
    assert (sound.name, sound.state) == ("environment Guess", "ok")
