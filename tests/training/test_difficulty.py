"""Rows drawn by what the policy can do, beside a trainer of TRL's that is built as usual."""

from collections import Counter

import numpy as np
import pytest
from datasets import Dataset
from safetensors.torch import load_file
from test_monitor import says, short, stock

import grpo_nb
from grpo_nb.training import newest_checkpoint

LEVELS = ["sum 1", "sum 1", "sum 2", "sum 2", "sum 3", "sum 3", "gcd 1", "gcd 2"] * 4
ROWS = [
    {"prompt": f"{n} + 2 = ", "answer": str(n), "level": level} for n, level in enumerate(LEVELS)
]


def drawn(folder, rows=ROWS, correct="", **arguments):
    """A trainer of 4 prompts a step, so that 13 rows make 3 steps an epoch."""
    usual = {"gradient_accumulation_steps": 2, "max_steps": 7, "save_steps": 1}
    usual |= {"save_strategy": "steps", "learning_rate": 1e-3}
    trainer = stock(folder, (says, short), **usual | arguments)
    trainer.train_dataset = Dataset.from_list(rows)
    grpo_nb.difficulty(trainer, correct)
    return trainer


def state_of(trainer):
    rows = trainer.difficulty
    return rows.chunks, rows.groups, rows.ends


@pytest.mark.parametrize(("passes", "steps"), [(1, [3, 5]), (2, [4, 6])])
def test_a_training_that_resumes_draws_and_learns_the_same(tmp_path, passes, steps):
    """At the end and in the middle of an epoch, with one update or two a generation."""
    rows = [{"prompt": row["prompt"], "answer": row["answer"]} for row in ROWS[:13]]
    options = {"rows": rows, "num_iterations": passes, "save_steps": passes}
    whole = drawn(tmp_path / "whole", **options)
    whole.train()
    weights = load_file(f"{newest_checkpoint(tmp_path / 'whole')}/model.safetensors")
    for step in steps:
        again = drawn(tmp_path / "again", **options)
        grpo_nb.difficulty(again)  # a cell that runs twice
        again.train(resume_from_checkpoint=str(tmp_path / f"whole/checkpoint-{step}"))
        assert state_of(again) == state_of(whole), step
        last = load_file(f"{newest_checkpoint(tmp_path / 'again')}/model.safetensors")
        assert all((last[name] == weights[name]).all() for name in weights), step
    chunks = whole.difficulty.chunks
    assert len(chunks) > len(rows) // 4 and all(len(set(chunk)) == 4 for chunk in chunks)


def test_a_row_is_noted_under_what_its_own_group_earned(tmp_path):
    """Also where a step takes several generations, and an epoch ends in the middle of a step."""
    rows = [{"prompt": "a", "answer": f"{n}"} for n in range(12)]
    options = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 5}
    trainer = drawn(tmp_path, rows[:10], **options)
    trainer.reward_funcs = [lambda answer, **_: [float(a) for a in answer], short]
    trainer.reward_weights[1] = 0
    trainer.train()
    means = {row: mean for row, (mean, _) in trainer.difficulty.groups.items()}
    assert means == {row: float(row) for row in means} and len(means) > 4
    assert trainer.difficulty.ends == [min(means), max(means)]


def with_groups(tmp_path, groups, rows=ROWS, **options):
    draws = drawn(tmp_path, rows, "says", **options).difficulty
    draws.groups |= groups
    return draws


def test_rows_that_are_always_or_never_solved_are_drawn_rarely_and_the_rest_as_usual(tmp_path):
    rows = [{"prompt": "a", "answer": "b"} for _ in range(12)]
    groups = {0: [0.5, 0.25], 1: [0.5, 0.25], 2: [1.0, 0.0], 3: [0.0, 0.0]}
    draws = with_groups(tmp_path, groups, rows)
    weights = draws.weights()
    assert weights[0] == weights[1] > 5 * weights[2] and weights[2] == weights[3] > 0
    assert np.allclose(weights[4:], weights[:4].mean()), "neutral: nothing is known of them"
    for draws.first in range(0, 200, 3):
        next(iter(draws))
    counts = Counter(row for chunk in draws.chunks for row in chunk)
    assert 3 * counts[2] < counts[0] and min(counts[n] for n in range(12)) > 0
    draws.groups |= {0: [1.0, 0.0], 1: [1.0, 0.0]}
    assert len(set(draws.weights())) == 1, "without any signal, each row is as good as another"


def test_a_level_opens_when_the_one_below_is_learnt_each_task_for_itself(tmp_path):
    def levels(groups):
        weights = with_groups(tmp_path, groups).weights()
        return sorted({level for level, weight in zip(LEVELS, weights, strict=True) if weight})

    first = [n for n, level in enumerate(LEVELS) if level == "sum 1"]
    gcd = [n for n, level in enumerate(LEVELS) if level == "gcd 1"]
    assert levels({}) == ["gcd 1", "sum 1"]
    assert levels({n: [0.6, 0.2] for n in first}) == ["gcd 1", "sum 1"]
    assert levels({n: [1.0, 0.0] for n in first[:2]}) == ["gcd 1", "sum 1"], "two rows are too few"
    assert levels({n: [0.8, 0.2] for n in first}) == ["gcd 1", "sum 1", "sum 2"]
    assert levels({n: [0.8, 0.2] for n in gcd}) == ["gcd 1", "gcd 2", "sum 1"]


@pytest.mark.parametrize("correct", ["says", ""])
def test_the_level_is_logged(tmp_path, correct):
    trainer = drawn(tmp_path, correct=correct, max_steps=1, logging_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["difficulty/level"] == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"correct": "say"}, "unknown reward 'say': did you mean 'says'"),
        ({"ignore_data_skip": True}, "leave it out"),
        ({"rows": ROWS[:3]}, "2 rows of the first level are fewer than the 4 prompts"),
        ({"rows": [row | {"level": "hard"} for row in ROWS]}, "'hard': write a number, or a name"),
    ],
)
def test_what_cannot_be_drawn_from_is_refused_in_one_sentence(tmp_path, options, why):
    with pytest.raises(ValueError, match=why) as refusal:
        drawn(tmp_path, **options)
    assert "\n" not in str(refusal.value)
