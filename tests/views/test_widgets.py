"""The widgets' callbacks, driven without a browser; tests/browser drives them with one."""

import html
import json

import pytest
from labs import click

from grpo_nb import views
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.models import load_tokenizer
from grpo_nb.reward_lab import RewardTest, bench_of
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve


def put(lab, widget, value):
    widget.value = value
    lab.actions.join()


def advantage(lab, number):
    return lab.table["advantage"][lab.prompt.value * 4 + number]


def test_a_slider_moves_totals_and_advantages(lab):
    before = lab.table["total"][0], advantage(lab, 3)
    put(lab, lab.sliders[1], 0.5)
    assert lab.table["total"][0] == before[0] + 0.25
    assert advantage(lab, 3) < before[1]
    assert "× 0.5<" in lab.view.value
    put(lab, lab.sliders[0], 0)
    assert lab.weights == [0.0, 0.5, 0.25, 0.125]
    assert lab.table["total"].tolist()[:2] == [0.875, 0.875]
    assert lab.table["numeric_correctness_reward"][0] == 1, "it is still scored"


def test_sliders_of_unlike_weights_stand_in_unlike_places(lab):
    places = [(each.value - each.min) / (each.max - each.min) for each in lab.sliders]
    assert places == [0.5, 0.125, 0.125, 0.0625]  # of 1, 0.25, 0.25, 0.125


def test_a_group_without_signal_is_marked(lab):
    for number in range(4):
        put(lab, lab.number, number)
        put(lab, lab.text, "the same")
    assert "zero advantage" in lab.view.value
    assert lab.summary.value.startswith("2 of 3 groups have advantages")


def test_an_edited_completion_is_scored_survives_a_look_at_another_and_can_be_undone(lab):
    expected = lab.baseline.rows[1]["answer"]
    put(lab, lab.prompt, 1)
    put(lab, lab.number, 3)
    put(lab, lab.text, f"<answer>{expected}</answer>")
    assert lab.table["numeric_correctness_reward"][7] == 1
    assert lab.table["total"][:4].tolist() == lab.table["total"][8:].tolist(), "others are left"
    put(lab, lab.number, 1)
    put(lab, lab.number, 3)
    assert lab.text.value == f"<answer>{expected}</answer>"
    assert lab.baseline.completions_P_G[1][3] == "7", "the baseline is not touched"
    click(lab, lab.original)
    assert lab.text.value == "7"
    assert lab.table["numeric_correctness_reward"][7] == 0


def test_probes_run_on_what_is_shown_and_no_click_comes_between(lab):
    taken = []
    lab.report.observe(lambda _: taken.append((lab.run.disabled, lab.adopt.disabled)), "value")
    click(lab, lab.run)
    assert "PASSED" in lab.status.value and "every number 0-100" in lab.report.value
    put(lab, lab.sliders[0], 0)
    click(lab, lab.run)
    assert "FAILED" in lab.status.value and lab.weights[0] == 0
    assert set(taken) == {(True, True)} and not (lab.run.disabled or lab.adopt.disabled)


MINE = """
def right(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [2.0 * (f">{want}<" in text) for want, text in zip(answer, texts)]

@rewards.reward()
def brief(response: str) -> float:
    print("seen")
    return float(len(response) <= 300)
"""


def test_rewards_written_in_the_box_are_scored_and_probed(lab, capsys):
    lab.code.value = MINE
    click(lab, lab.run)
    assert (lab.errors.value, capsys.readouterr().out) == ("", "")
    assert lab.table["right"].tolist() == [2, 0, 0, 0] * 3
    assert lab.weights == [1, 1] and "brief × 1<" in lab.view.value
    blamed = "FAILED, do not train: several answers: "
    assert blamed in html.unescape(lab.status.value) and "every number 0-100" in lab.report.value
    lab.code.value = "# nothing"
    click(lab, lab.run)
    assert len(lab.sliders) == 4 and "PASSED" in lab.status.value
    assert not (lab.stage.run / "rewards").exists(), "nothing is adopted"


TRLS = "def f(completions, **kwargs):\n"
LIFTED = "@rewards.reward()\ndef f(response):\n    return "
FAULTS = {  # what is said of a text, once it is escaped
    "line 1 (def f(completions, **kwargs)): SyntaxError: expected": "def f(completions, **kwargs)",
    "line 2 (return [1 / 0]): ZeroDivisionError: division": f"{TRLS}    return [1 / 0]",
    "line 3 (return 1 / (len(response) - 1)): Zero": f"{LIFTED}1 / (len(response) - 1)",
    "reward f gave 1 scores for": f"{TRLS} return [1]",
    "reward f returned None, not a list": f"{TRLS} ...",
    "reward f gave 12 scores for 12 completions, such as ['a']": f"{TRLS} return ['a'] * 12",
    "TypeError: must be real number, not str, in reward f, completion 0": f"{LIFTED}'a'",
    "reward f gave 3, outside its declared": f"{LIFTED}3",
}


@pytest.mark.parametrize("said", FAULTS)
def test_what_is_wrong_with_the_box_is_one_sentence_with_its_line(lab, said):
    lab.code.value = FAULTS[said]
    click(lab, lab.run)
    shown = html.unescape(lab.errors.value.partition("<details>")[0]).partition("'alert'>")[2]
    assert shown.startswith(said)
    assert "\n" not in shown and "Traceback" not in shown
    assert len(lab.sliders) == 4, "the rewards stay as they were"
    lab.code.value = ""
    click(lab, lab.run)
    assert lab.errors.value == ""


def test_a_task_with_an_environment_is_checked_in_place_of_the_lab():
    config = resolve("tiny-cpu", {"task": "guess"})
    lines = (PROJECT_ROOT / "data/tasks/guess.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [{**row, "prompt": [{"role": "user", "content": row["question"]}]}
            for row in map(json.loads, lines[:8])]  # fmt: skip
    bench = bench_of(config, load_preset("environment"), load_tokenizer("data/agent_base"))
    [sound] = views.lab(RewardTest(Stage(Run("lab"), "02", config), rows, None, bench))
    assert (sound.name, sound.state) == ("environment Guess", "ok")
