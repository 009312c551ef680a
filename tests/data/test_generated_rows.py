"""Rows made by reasoning-gym: any task by name, sizes, shots; and what is refused."""

import json
from collections import Counter

import pytest
from reasoning_gym.factory import DATASETS

import grpo_nb
from grpo_nb.rewards import gym, load_preset
from grpo_nb.runs.config import resolve

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def prepared(tasks="chain_sum", rows=40, **arguments):
    return grpo_nb.prepare(f"reasoning-gym:{tasks}", max_rows=rows, **arguments)


def all_rows(made):
    return [row for split in made.rows.values() for row in split]


def test_rows_differ_even_in_the_order_of_what_is_added_and_follow_the_seed():
    made = prepared(options=EASY | {"allow_negation": False}, rows=60)
    sums = [json.loads(row["entry"])["metadata"]["expression"] for row in all_rows(made)]
    keys = {frozenset(Counter(each.split()).items()) for each in sums if "+" in each}
    assert len(keys) == len([each for each in sums if "+" in each])
    first, again, other = (
        [row["question"] for row in all_rows(prepared(options=EASY, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again and len({*first} & {*other}) < len(first)


def test_worked_turns_of_other_rows_stand_before_each_question_in_the_form_asked_for():
    made = prepared(shots=2, form="boxed")
    shown = {str(row["prompt"][:-1]) for row in all_rows(made)}
    assert len(shown) == 1 and len(all_rows(made)) == 38
    roles = [turn["role"] for turn in made.rows["train"][0]["prompt"]]
    assert roles == ["system", *["user", "assistant"] * 2, "user"]
    turns = made.rows["train"][0]["prompt"][1:-1]
    assert not {row["question"] for row in all_rows(made)} & {turn["content"] for turn in turns}
    assert all(turn["content"].startswith("\\boxed") for turn in turns[1::2])


@pytest.mark.parametrize(
    ("tasks", "options", "why"),
    [
        ("chain_sums", {}, "did you mean 'chain_sum'"),
        ("rubiks_cube", {}, "cannot be used: it has no reference answer"),
        ("arc_agi", {}, "cannot be used: its scorer compares tuples"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(tasks, options, why):
    with pytest.raises(ValueError, match=why) as refusal:
        prepared(tasks, 20, **options)
    assert "\n" not in str(refusal.value)


def test_the_source_alone_chooses_rewards_and_kind_of_answer():
    named = {"data.source": "reasoning-gym:gcd", "data.options": "{max_numbers: 2}"}
    config = resolve("smollm2-cpu", named)
    assert (config.task, config.rewards.preset, config.data.answer_kind) == ("gym", "gym", "text")
    assert config.data.options == {"max_numbers": 2} and config.data.shots == 2
    assert (config.train.sft_steps, config.rewards.form) == (0, "")
    assert resolve("tiny-cpu", named | {"rewards.preset": "qa"}).rewards.preset == "qa"


SLOW = {"knight_swap", "futoshiki", "zebra_puzzles"}
SLOW |= {"number_sequence"}  # now and then


@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(gym.REFUSED) - SLOW))
def test_every_task_that_is_offered_makes_rows_whose_references_win(task):
    made = grpo_nb.prepare(f"reasoning-gym:{task}", max_rows=6)
    preset = load_preset("gym")
    columns = {name: [row[name] for row in all_rows(made)] for name in ("answer", "entry")}
    completions = [preset.reference(row) for row in all_rows(made)]
    assert preset.reward_funcs[0](completions, **columns) == [1.0] * len(completions)
