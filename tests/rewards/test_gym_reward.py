"""The reward of reasoning-gym's tasks: strict, and no answer runs as code."""

import json

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from grpo_nb.data.gym import REFUSED
from grpo_nb.rewards import gym_reward, load_preset

WRITES = ["open('{}', 'w').write('x')", "[open('{}', 'w')]", "exec(\"open('{}', 'w')\")"]
WRITES += ["__import__('os').system('touch {}')"]
LOOPS = "[" + " ".join(["'a'", *(f"for {name} in '{'a' * 90}'" for name in "abcdef")]) + "]"
NEVER_ENDS = (LOOPS, "9**9**8", "1e999999999", "1/1e-999999999", "[" * 5000, "9" * 5000, "(" * 5000)
NEVER_ENDS += ("(9\n**9\n**8)",)
RUN_CODE = ["binary_matrix", "n_queens", "spiral_matrix", "string_insertion", "countdown"]
SLOW = {"knight_swap"}  # takes seconds to begin


def entry_of(task, **options):
    made = reasoning_gym.create_dataset(task, size=3, seed=3, **options)[0]
    about = {"task": task, "options": options, "metadata": made["metadata"]}
    return made["answer"], json.dumps(about, default=str)


def paid(text, answer, entry, **options):
    func = gym_reward.configured("r", **options) if options else gym_reward
    return func([f"<answer>{text}</answer>"], answer=[answer], entry=[entry])[0]


@pytest.mark.parametrize("task", sorted(set(DATASETS) - set(REFUSED) - SLOW))
def test_no_answer_writes_a_file_or_never_ends(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    answer, entry = entry_of(task)
    file = tmp_path / "written"
    for text in (*(each.format(file) for each in WRITES), *NEVER_ENDS):
        assert paid(text, answer, entry, partial=True) < 1, text
    assert not list(tmp_path.iterdir())


def test_an_answer_is_right_if_the_scorer_says_so_in_any_spelling_it_takes():
    answer, entry = entry_of("chain_sum", max_terms=2)
    assert paid(f" {answer}.0 ", answer, entry) == 1
    assert paid(f"{answer} or 7", answer, entry) == 0
    assert 0 < paid(f"{answer} or 7", answer, entry, partial=True) < 1
    _, entry = entry_of("countdown", min_numbers=3, max_numbers=3)
    about = json.loads(entry)["metadata"]
    terms = about["expression"]
    assert paid(f"0*0 + {terms}", terms, entry) == 0, "a number too many"
    assert paid(f"({terms})", terms, entry) == 1


@pytest.mark.parametrize("task", RUN_CODE)
def test_code_never_reaches_a_scorer_that_would_run_it(task, monkeypatch):
    answer, entry = entry_of(task)
    code = ["answer", "oracle_answer", "[[0]]", "['a']", "entry['answer']", "(lambda: 1)()", "9**9"]
    seen = []
    monkeypatch.setattr(DATASETS[task][0], "score_answer", lambda _, text, entry: seen.append(text))
    assert all(paid(text, answer, entry, partial=True) == 0 for text in code)
    assert not seen


def test_any_of_the_boards_of_n_queens_is_right():
    for item in reasoning_gym.create_dataset("n_queens", size=20, seed=0):
        entry = json.dumps({"task": "n_queens", "options": {}, "metadata": item["metadata"]})
        for board in item["metadata"]["valid_answers"]:
            assert paid(board, item["answer"], entry) == 1


@pytest.mark.parametrize("text", ["", " ", "NaN", "nanj", "inf", "[NaN, NaN]", "1" * 20_000])
def test_nothing_and_what_is_no_number_earn_nothing(text):
    for task in ("complex_arithmetic", "number_sorting", "prime_factorization", "power_function"):
        answer, entry = entry_of(task)
        assert paid(text, answer, entry, partial=True) == 0, task


def test_the_presets_pay_for_right_answers_only_or_for_parts():
    answer, entry = entry_of("spell_backward")
    almost = answer[:-1] + "?"
    strict, parts = (load_preset(name).reward_funcs[0] for name in ("gym", "gym_partial"))
    columns = {"answer": [answer], "entry": [entry]}
    assert strict([f"<answer>{almost}</answer>"], **columns) == [0.0]
    assert 0 < parts([f"<answer>{almost}</answer>"], **columns)[0] < 1
