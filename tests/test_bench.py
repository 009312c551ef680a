import numpy as np
import pytest

from grpo_nb import bench
from grpo_nb.advantages import group_advantages, weighted_totals
from grpo_nb.rewards import load_preset, reward, reward_set

ROWS = [
    {"prompt": [], "question": "47 + 38?", "answer": "85"},
    {"prompt": [], "question": "1 + 1?", "answer": "2"},
]
RIGHT = "<reasoning>1+1=2</reasoning><answer>85</answer>"


def test_a_table_line_holds_scores_total_and_advantage():
    table = bench.score_table(load_preset("math"), ROWS, [[RIGHT, "85."], ["2", "2"]])
    assert table["numeric_correctness_reward"].tolist() == [1, 1, 1, 1]
    assert table["total"].tolist() == [1.625, 1, 1, 1]
    assert table["advantage"].round(3).tolist() == [0.707, -0.707, 0, 0]
    assert table["gold"].tolist() == ["85", "85", "2", "2"]


def test_the_gold_wins_with_the_math_preset():
    preset = load_preset("math")
    pilot = bench.score_table(preset, ROWS, [[RIGHT, "84"], ["2", "3"]])
    report = bench.gold_report(preset, ROWS, pilot)
    assert report["gold_wins"]
    assert set(report["lowest"].values()) == {1.0}


def test_a_correctness_that_the_gold_does_not_satisfy_is_caught():
    @reward()
    def never(response: str) -> float:
        return 0.0

    preset = reward_set([(never, 1.0)])
    pilot = bench.score_table(preset, ROWS, [["1", "2"], ["3", "4"]])
    report = bench.gold_report(preset, ROWS, pilot)
    assert not report["gold_wins"]
    assert report["losers"] == ["47 + 38?", "1 + 1?"]


def test_a_reward_that_pays_a_wrong_answer_more_than_the_gold_is_caught():
    @reward()
    def long_winded(response: str) -> float:
        return min(1.0, len(response) / 1000)

    math = load_preset("math")
    preset = reward_set([(math.reward_funcs[0], 1.0), (long_winded, 4.0)])
    pilot = bench.score_table(preset, ROWS, [["x" * 900, "y"], ["2", "3"]])
    assert bench.gold_report(preset, ROWS, pilot)["losers"] == ["47 + 38?"]


def test_groups_without_signal_are_counted():
    preset = load_preset("math")
    table = bench.score_table(preset, ROWS, [[RIGHT, "85."], ["2", "2"]])
    report = bench.signal_report(preset, table, num_generations=2)
    assert (report["groups"], report["groups_with_signal"]) == (2, 1)


def test_none_counts_zero_and_a_row_without_any_score_is_left_out():
    scores = np.array([[1.0, np.nan], [np.nan, np.nan], [0.0, 0.5], [1.0, 0.5]])
    totals = weighted_totals(scores, np.array([1.0, 2.0]))
    np.testing.assert_array_equal(totals, [1.0, np.nan, 1.0, 2.0])
    advantages = group_advantages(totals, 4, "none")
    np.testing.assert_allclose(advantages, [-1 / 3, 0, -1 / 3, 2 / 3])


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="5 completions do not make groups of 2"):
        group_advantages(np.zeros(5), 2)


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_follow_trls_formula(scale_rewards):
    import torch
    from trl.trainer.utils import nanstd

    totals = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    totals[2, 3] = torch.nan
    totals[4] = 0.5
    expected = totals - torch.nanmean(totals, dim=1, keepdim=True)
    if scale_rewards == "group":
        expected = expected / (nanstd(totals, dim=1)[:, None] + 1e-4)
    elif scale_rewards == "batch":
        expected = expected / (nanstd(totals.flatten()) + 1e-4)
    ours = group_advantages(totals.flatten().double().numpy(), 8, scale_rewards)
    np.testing.assert_allclose(ours, expected.nan_to_num(0.0).flatten(), atol=1e-6)
