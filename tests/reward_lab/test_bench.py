"""The score table."""

import numpy as np
import pytest

from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import Scored, load_preset, reward, reward_set
from grpo_nb.runs.config import resolve

SUMS = {"47 + 38?": "85", "1 + 1?": "2"}
ROWS = [{"prompt": [], "question": q, "answer": expected} for q, expected in SUMS.items()]
RIGHT = "<reasoning>1+1=2</reasoning><answer>85</answer>"
MATH = Bench(load_preset("math"))


@reward()
def long_winded(response: str) -> Scored:
    return Scored(min(1.0, len(response) / 1000), "waited")


def test_a_table_line_holds_scores_total_and_advantage():
    table = MATH.table(ROWS, [[RIGHT, [{"role": "assistant", "content": "85."}]], ["2", "2"]])
    assert table["completion"].tolist() == [RIGHT, "85.", "2", "2"]
    assert table["reference"].tolist() == ["85", "85", "2", "2"]
    assert table["answer"].tolist() == ["85", "85.", "2", "2"]
    assert table["soft_format_reward"].tolist() == [1, 0, 0, 0]
    assert table["total"].tolist() == [1.625, 1, 1, 1]
    assert table["mean"].tolist() == [1.3125, 1.3125, 1, 1]
    assert table["std"].round(3).tolist() == [0.442, 0.442, 0, 0]
    assert table["advantage"].round(3).tolist() == [0.707, -0.707, 0, 0]
    assert table["signal"].tolist() == [True, True, False, False]
    assert table["correct"].tolist() == [True, True, True, True]


def test_foreign_rewards_give_scores_and_a_wrong_number_of_them_is_refused():
    def foreign(completions, **_):
        return [None, float("nan"), 1, 0.25][: len(completions[0][0]["content"])]

    ours = Bench(reward_set([(long_winded, 1.0), (foreign, 1.0)]))
    table = ours.table(ROWS, [["abcd", "b"], ["", ""]])
    assert table["long_winded/reason"].tolist() == ["waited"] * 4
    np.testing.assert_array_equal(table["total"], [0.004, 0.001, 1, 0.25])
    with pytest.raises(ValueError, match="foreign gave 3 scores for 4 completions"):
        ours.table(ROWS, [["abc", "b"], ["", ""]])


def test_weights_and_settings_of_the_training_decide():
    heavier = MATH._replace(preset=load_preset("math", "1, 2, 0, 0"))
    said = [[RIGHT, "85."], ["2", "<answer>3</answer>"]]
    assert heavier.table(ROWS, said)["total"].tolist() == [3, 1, 1, 0]
    grpo = resolve("tiny-cpu", {"grpo.loss_type": "dr_grpo"}).grpo
    unscaled = MATH._replace(grpo=grpo, unsloth_on_gpu=True).table(ROWS, said)["advantage"]
    assert unscaled.tolist() == [0.3125, -0.3125, 0.4375, -0.4375]
