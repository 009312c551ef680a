"""The page of human pairs, driven without a browser: clicks go to the run, and go on after it."""

import html
import re

import pytest
import scripted_judges as scripts
from labs import click
from scripted_judges import MATH, ROWS, completions_of

from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest, human_pairs
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import reward_set
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.runs.files import read_lines
from grpo_nb.views import RewardLab

JUDGE = scripts.InProcess("m", name="<judge>", cache=False)


def open_lab(judge=JUDGE):
    groups = [[Sample(text, 9, False) for text in completions_of(row)] for row in ROWS[:8]]
    stage = Stage(Run("lab"), "02", resolve("tiny-cpu", {}))
    bench = Bench(reward_set([*MATH.pairs, (judge, 0.25)], MATH))
    lab = RewardLab(RewardTest(stage, ROWS, Baseline(ROWS[:8], groups), bench))
    lab.actions.join()
    assert lab.errors.value == ""
    return lab


def page_of(lab):
    return lab.children[-1]


@pytest.fixture
def lab(runs_dir):
    return open_lab()


def shown(page):
    return html.unescape(re.sub("<[^>]+>", " ", page.view.value))


def test_a_click_is_written_before_the_next_pair_is_shown(lab):
    page = page_of(lab)
    file, (first, second) = lab.stage.run / human_pairs.FILE, page.pairs[:2]
    assert not file.exists() and "0 of 40 pairs answered" in shown(page)
    assert "&lt;judge&gt;" in page.view.value and str(first.difference) not in page.view.value
    page.view.observe(lambda _: lines.append(len(read_lines(file))), "value")
    lines = []
    left, equal, _ = page.buttons
    click(lab, left)
    assert lines == [1] and "1 of 40 pairs answered" in shown(page)
    assert second.question in shown(page)
    click(lab, equal)
    assert [line["better"] for line in read_lines(file)] == ["left", "equal"]


def test_clicks_go_on_after_a_restart(lab):
    page = page_of(lab)
    click(lab, page.buttons[0])
    pair = page.pairs[1]
    again = page_of(open_lab())
    assert "1 of 40 pairs answered" in shown(again) and again.pairs[1] == pair
    assert pair.question in shown(again)


def test_after_twenty_clicks_the_agreement_and_where_they_differ_most(lab):
    page = page_of(lab)
    for number in range(40):
        assert ("right on" in page.report.value) == (number >= 20)
        is_left = page.pairs[number].difference > 0
        wrong = number in (2, 5)  # a person who twice differs from the judge
        click(lab, page.buttons[0 if is_left != wrong else 2])
    assert "human pairs: ok, right on 38 of 40 pairs (83% to 99%, mark 70%)" in page.report.value
    assert page.report.value.count("<tr") == 1 + 2
    assert html.escape(page.pairs[2].left) in page.report.value
    assert all(button.disabled for button in page.buttons)
    assert "40 of 40 pairs answered" in shown(page)


def test_a_full_disk_is_shown_and_the_pair_stays(lab):
    page = page_of(lab)
    (lab.stage.run / "rewards").parent.mkdir(parents=True, exist_ok=True)
    (lab.stage.run / "rewards").write_text("in the way")
    before = page.view.value
    click(lab, page.buttons[0])
    assert "rewards" in page.errors.value and "role='alert'" in page.errors.value
    assert page.view.value == before and not page.pairs[0].better


def test_without_a_judge_there_is_no_page(runs_dir):
    lab = open_lab(MATH.reward_funcs[0].configured("other"))
    assert not hasattr(page_of(lab), "pairs")


def test_the_labs_verdict_counts_the_clicks(lab):
    page = page_of(lab)
    for _ in range(20):
        click(lab, page.buttons[1])
    click(lab, lab.run)
    checks = {check.name: check for check in lab.verdict.checks}
    assert checks["<judge>: human pairs"].evidence == "none of 20 pairs was conclusive"
