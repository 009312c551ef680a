"""The shipped environments: rows from their script, won by their own oracle and by nothing else."""

import json

import pytest

from grpo_nb.environments.examples.calculator import Calculator
from grpo_nb.environments.examples.guess import NUMBERS, TURNS, Guess

KINDS = {"calculator": Calculator, "guess": Guess}


@pytest.fixture(params=list(KINDS))
def rows(request):
    from make_environments import read_rows

    return request.param, read_rows(request.param)


def played(environment, calls):
    results = [getattr(environment, one["name"])(**one["arguments"]) for one in calls]
    return results, environment.get_reward()


def test_the_rows_are_the_scripts_and_no_question_stands_twice(rows):
    import make_environments

    name, read = rows
    assert make_environments.make_rows(name) == read
    assert len({row["question"] for row in read}) == len(read) == make_environments.ROWS
    assert all(json.loads(json.dumps(row)) == row for row in read)


def test_the_oracle_wins_every_row_in_one_reused_instance(rows):
    name, read = rows
    environment = KINDS[name]()
    for row in read:
        assert environment.reset(**row) is None
        assert not environment.done and environment.get_reward() == 0
        assert played(environment, KINDS[name].solve(**row))[1] == 1
        assert environment.done


def test_an_answer_is_paid_only_after_the_calculator():
    environment = Calculator()
    environment.reset(a=47, b=38)
    assert played(environment, [{"name": "answer", "arguments": {"value": 1786}}])[1] == 0
    environment.reset(a=47, b=38)
    assert environment.multiply(3, 3) == "9"
    assert environment.answer(1786) == "over" and environment.get_reward() == 0


def test_the_first_answer_counts():
    environment = Calculator()
    environment.reset(a=47, b=38)
    assert environment.multiply(47, 38) == "1786"
    assert environment.answer(1) == environment.answer(1786) == "over"
    assert environment.get_reward() == 0


def test_guesses_are_answered_until_the_turns_are_over():
    environment = Guess()
    environment.reset(low=41, secret=45)
    assert [environment.guess(n) for n in (44, 46, 0, 99)] == ["higher", "lower", "higher", "lower"]
    assert environment.done and environment.guess(45) == "over"
    assert environment.get_reward() == 0


@pytest.mark.parametrize("secret", range(NUMBERS))
def test_halving_finds_every_secret_in_time(secret):
    assert len(Guess.solve(low=0, secret=secret)) <= TURNS
