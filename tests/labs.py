"""A Reward Lab to drive without a browser."""

from hackable import ROWS

from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.views import RewardLab

RIGHT = "<reasoning>1+1=2</reasoning><answer>{}</answer>"


def open_lab():
    """Three prompts with four completions each, one of them right."""
    tried = Baseline(ROWS[:3], [samples_of(row) for row in ROWS[:3]])
    stage = Stage(Run("lab"), "02", resolve("tiny-cpu", {}))
    opened = RewardLab(RewardTest(stage, ROWS, tried, Bench(load_preset("math"))))
    assert opened.errors.value == ""
    return opened


def samples_of(row):
    wrong = Sample(RIGHT.format("-1"), 20, False)
    return [Sample(RIGHT.format(row["answer"]), 20, False), wrong, wrong, Sample("7", 2, True)]


def click(lab, button):
    button.click()
    lab.actions.join()
