"""The environments that are shipped: their rows, who wins them, and who does not."""

import json

import pytest
from make_environments import ENVIRONMENTS, make_rows

from grpo_nb.environments import check, check_environment, check_rows, load
from grpo_nb.environments.examples import Calculator, Guess
from grpo_nb.environments.play import replay, script
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.notebooks import with_full_paths

ROWS = PROJECT_ROOT / "data/tasks"
PROMPT = [{"role": "user", "content": "Begin."}]


def read(name):
    lines = (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [{**row, "prompt": PROMPT} for row in map(json.loads, lines)]


def played(name, row, *calls):
    """Each call: the tool's name, and its arguments by name."""
    turns = script([{"name": name, "arguments": given} for name, given in calls])
    return replay(load(name), {**row, "prompt": PROMPT}, turns)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_rows_are_what_the_script_makes_and_no_question_stands_twice(name):
    rows = read(name)
    assert rows == [{**row, "prompt": PROMPT} for row in make_rows(name)]
    assert len({row["question"] for row in rows}) == len(rows) == 400
    check_rows(load(name), rows)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_solve_wins_every_row_in_one_used_instance(name):
    environment = load(name)
    used = environment.factory()
    assert [one.state for one in check_environment(environment, read(name))] == ["ok"]
    for row in read(name):
        end = check.perform(environment, row, environment.solution(row), instance=used)
        assert (end.reward, end.played.done) == (1.0, True)
        assert "'error'" not in str(end.messages)


RIGHT_FACTORS, RIGHT_PRODUCT = ("multiply", {"a": 47, "b": 38}), ("answer", {"value": 1786})


@pytest.mark.parametrize(
    ("calls", "earned"),
    [
        ([RIGHT_PRODUCT], 0),  # out of the air
        ([("multiply", {"a": 3, "b": 3}), RIGHT_PRODUCT], 0),
        ([RIGHT_FACTORS, ("answer", {"value": 1}), RIGHT_PRODUCT], 0),  # the first counts
        ([RIGHT_FACTORS, RIGHT_PRODUCT], 1),
    ],
)
def test_an_answer_is_paid_after_the_calculator_showed_it(calls, earned):
    assert played("calculator", {"a": 47, "b": 38}, *calls).get_reward() == earned
    alone = Calculator()  # as TRL holds it
    alone.reset(a=47, b=38)
    said = [getattr(alone, name)(**given) for name, given in calls]
    assert said[-1] == "over" and alone.get_reward() == earned


def test_guesses_are_answered_until_the_turns_are_over():
    alone = Guess()
    alone.reset(low=41, secret=45)
    assert [alone.guess(n) for n in (44, 46, 0, 99)] == ["higher", "lower", "higher", "lower"]
    assert alone.done and alone.guess(45) == "over"
    assert alone.get_reward() == 0


def test_a_class_in_a_file_is_found_from_where_the_command_stands(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Guess: pass", encoding="utf-8")
    (tmp_path / "guess").mkdir()  # a folder that has the example's name
    monkeypatch.chdir(tmp_path)
    given = {"data.environment": "mine.py:Guess", "data.source": "guess", "model.model_name": None}
    assert with_full_paths(given) == {**given, "data.environment": f"{tmp_path}/mine.py:Guess"}
    assert with_full_paths({"data.environment": "guess"}) == {"data.environment": "guess"}
