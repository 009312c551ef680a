"""Rows made by reasoning-gym: any task by name, sizes, weights, shots; and what is refused."""

import json
import sys
from collections import Counter

import pytest
from reasoning_gym.factory import DATASETS

import grpo_nb
from grpo_nb.data import gym
from grpo_nb.rewards import load_preset
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
    assert len(made.rows["train"]) + len(made.rows["eval"]) == made.report["generated"]["questions"]
    first, again, other = (
        [row["question"] for row in all_rows(prepared(options=EASY, seed=seed))]
        for seed in (1, 1, 2)
    )
    assert first == again and len({*first} & {*other}) < len(first)


def test_as_many_rows_are_made_as_asked_for():
    counts = {rows: prepared("gcd", rows).report["rows_read"] for rows in (7, 0)}
    assert counts == {7: 7, 0: 1000}


def test_several_tasks_are_mixed_by_weight_with_options_below_their_names():
    made = prepared("3*chain_sum+gcd", 80, options={"chain_sum": EASY}, shots=1)
    tasks = Counter(json.loads(row["entry"])["task"] for row in all_rows(made))
    assert tasks.total() == 78 and tasks["chain_sum"] > 1.5 * tasks["gcd"] > 0
    for row in all_rows(made):  # the worked turn is of the same task
        texts = [turn["content"] for turn in row["prompt"] if turn["role"] == "user"]
        assert len({"Divisor" in text for text in texts}) == 1


def test_levels_rise_with_the_curriculum_and_the_sizes_that_are_set_stay():
    options = {"chain_sum": {"min_digits": 1, "max_digits": 1}}
    made = prepared("chain_sum+gcd", 90, levels=3, options=options, shots=1)
    assert len({row["level"] for row in all_rows(made)}) == 6
    sums = [row for row in all_rows(made) if row["level"].startswith("chain_sum")]
    for row in sums:
        about = json.loads(row["entry"])["metadata"]
        assert row["level"] == f"chain_sum {about['num_terms'] - 1}" and about["num_digits"] == 1


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
        ("chain_sum", {"max_term": 3}, "made no row .*unexpected keyword argument 'max_term'"),
        ("chain_sum", {"max_terms": 1}, r"made no row \(max_terms must be >= min_terms\)"),
        ("chain_sum", {"max_terms": "two"}, "made no row"),
        ("chain_sum+gcd", {"max_terms": 3}, "unknown task in data.options 'max_terms'"),
        ("chain_sum+gcd", {"gcd": 3}, "write {gcd: {…}}"),
        ("rubiks_cube", {}, "cannot be used: it has no reference answer"),
        ("arc_agi", {}, "cannot be used: its scorer compares tuples"),
        ("acre", {"levels": 2}, "acre has no levels: set data.levels = 0"),
        ("caesar_cipher", {"levels": 3}, "or fewer data.levels"),
        ("chain_sum", EASY | {"max_digits": 1, "allow_negation": False}, "set data.max_rows = "),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(tasks, options, why):
    rows = 2000 if "set data.max_rows" in why else 20
    with pytest.raises(ValueError, match=why) as refusal:
        prepared(tasks, rows, **(options if "levels" in options else {"options": options}))
    assert "\n" not in str(refusal.value)


def test_without_the_package_a_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"reasoning-gym is not installed: pip install"):
        prepared()


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
