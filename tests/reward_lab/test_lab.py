"""The Reward Lab, driven without a browser; tests/browser drives it with one."""

import html
import inspect
import json

import pytest
from hackable import ROWS
from labs import RIGHT, open_lab
from pictures import ROWS as PICTURES
from pictures import seen

from grpo_nb import RewardLab, check_rewards, views
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import Sample, load_tokenizer
from grpo_nb.reward_lab import Bench, RewardTest, bench_of, judge
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve


def shown(lab):
    """The rows of the table of rewards, as texts."""
    cells = lab.view.value.rpartition("</style>")[2].replace("<td class=whole>", "<td>")
    lines = [line.split("<td>")[1:] for line in cells.split("<tr>")[2:]]
    return [[html.unescape(each.partition("</td>")[0]) for each in line] for line in lines]


def careless(completions, answer, **_):
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [float(want in text) / len(text[:1]) for want, text in zip(answer, texts, strict=True)]


def test_it_takes_what_check_rewards_takes_and_shows_the_same_verdict():
    taken = inspect.signature(check_rewards).parameters
    assert inspect.signature(RewardLab).parameters == taken
    lab, verdict = open_lab(careless), check_rewards(careless, ROWS, [[RIGHT.format("85"), "7"]])
    assert lab.verdict.findings == verdict.findings and lab.verdict.table == verdict.table
    assert str(verdict).splitlines()[0].partition("(")[0] in lab.status.value
    assert "every number 0-100" in lab.report.value and "careless: raises" in lab.report.value


def test_the_completions_of_a_row_stand_in_the_order_of_what_they_earn():
    lab = open_lab()
    labels = [label for label, _ in lab.name.options]
    totals = [float(label.partition(" · ")[0]) for label in labels]
    assert totals == sorted(totals, reverse=True) and len(labels) > 50
    assert labels[0] == "1.62 · the right answer" == lab.name.label
    assert {"another row's answer", "sampled completion 2", "prompt"} <= set(lab.texts)
    lab.name.value = "sampled completion 2"
    assert lab.text.value == "7"
    lab.name.value = "plea for full marks"
    lab.row.value = 1
    assert lab.name.value == "plea for full marks", "the choice stays from row to row"
    assert "sampled completion 1" not in lab.texts


def test_an_edited_completion_is_scored_and_its_answer_marked():
    lab = open_lab()
    assert shown(lab)[0][:5] == ["numeric_correctness_reward", "right", "1", "1", "1"]
    assert shown(lab)[0][5] == "85, read as a number, is 85"
    lab.text.value = RIGHT.format("12 or 13")
    assert "<mark>12 or 13</mark>" in lab.view.value and "this earns 0.625" in lab.view.value
    assert shown(lab)[0][2] == "0"
    lab.text.value = "no answer"
    assert "<mark>" not in lab.view.value and "this earns 0;" in lab.view.value
    lab.name.value = "empty form"
    assert lab.text.value == "<reasoning></reasoning><answer></answer>"


def test_a_reward_that_raises_says_so_in_its_line_and_others_are_scored():
    def one(completions, **_):
        return [1.0] * len(completions)

    lab = open_lab([careless, one])
    lab.text.value = ""
    assert shown(lab)[0][5] == "ZeroDivisionError: float division by zero"
    assert shown(lab)[1][:3] == ["one", "shaping", "1"] and lab.errors.value == ""


def test_without_a_reference_there_are_the_sampled_ones_and_any_text():
    lab = open_lab(lambda completions, **_: [len(c) / 9 for c in completions], [{"prompt": "Hi"}])
    assert {*lab.texts} == {"sampled completion 1", "sampled completion 2", "an empty completion"}
    lab.text.value = "<b>nine</b>"
    assert "&lt;b&gt;" in lab.view.value and "<b>nine" not in lab.view.value


def test_images_of_the_row_are_shown():
    lab = RewardLab(load_preset("qa").reward_funcs, PICTURES[:4])
    for place in (0, 2, 1):
        lab.row.value = place
        assert lab.view.value.count("<img") == 1 and lab.errors.value == ""
    assert seen(PICTURES[0]["images"][0]) == "red"


@pytest.fixture
def run_test(runs_dir):
    groups = [[Sample(RIGHT.format(row["answer"]), 20, False), Sample("7", 2, True)]
              for row in ROWS[:3]]  # fmt: skip
    stage = Stage(Run("lab"), "02", resolve("tiny-cpu", {}))
    return RewardTest(stage, ROWS, Baseline(ROWS[:3], groups), Bench(load_preset("math")))


def test_notebook_2_shows_the_rewards_of_the_run(run_test):
    lab = views.lab(run_test)
    assert isinstance(lab, RewardLab) and lab.texts["sampled completion 2"] == "7"
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
