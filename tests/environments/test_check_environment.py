"""Findings: what is planted in an environment is found and named, and what is sound is left."""

import re
from pathlib import Path

import pytest
from flawed_environments import CLEAN, FLAWED, Hunt, PaysFailure, hunt_rows

from grpo_nb.checks import Checks
from grpo_nb.environments import check, check_environment


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUNT_TURNS", "0")  # an environment sets it, and it is removed afterwards
    yield
    assert Path.cwd() == tmp_path


def found_in(kind, rows):
    return [one for one in check_environment(kind, rows) if one.state != "ok"]


@pytest.mark.parametrize("kind", FLAWED, ids=lambda kind: kind.__name__)
def test_what_is_planted_is_refused_by_the_finding_that_names_it_alone(kind, monkeypatch):
    monkeypatch.setattr(check, "EPISODES", 8)
    found = found_in(kind, hunt_rows())
    assert {one.name.partition(":")[0] for one in found} == {FLAWED[kind]}, found
    assert all(one.evidence and one.fix for one in found)
    with pytest.raises(ValueError, match=FLAWED[kind]):
        Checks(found).refuse()


@pytest.mark.parametrize("kind", CLEAN, ids=lambda kind: kind.__name__)
def test_what_is_clean_passes_without_a_word(kind):
    assert found_in(kind, CLEAN[kind]) == []
    assert found_in(kind, CLEAN[kind][:3]) == []


def test_without_solve_what_cannot_be_judged_is_a_warning():
    def without(name):
        left_out = (name, "__dict__", "__weakref__")
        return type("Bare", (), {k: v for k, v in vars(Hunt).items() if k not in left_out})

    change = {"get_reward": lambda self: 1.0, "__module__": "no_file"}  # its source is not found
    unsound = type("Unsound", (without("solve"),), change)
    for name in ("solve", "get_reward"):  # rewards may take `environments`
        [found] = found_in(without(name), hunt_rows())
        assert (found.name, found.state) == ("not judged", "warning")
        assert f"without {name}, " in found.evidence
    stops = [one.name for one in found_in(unsound, hunt_rows()) if one.state == "stop"]
    assert "without skill: idle" in stops


def test_patience_ends_and_one_row_is_enough(monkeypatch):
    monkeypatch.setattr(check, "PATIENCE", 0.0)
    [found] = found_in(PaysFailure, hunt_rows()[:1])
    assert found.name == "oracle"


@pytest.mark.parametrize(
    ("turns", "evidence"),
    [
        ([{"name": "gues", "arguments": {}}], "its calls gave {'error': 'Tool gues not found.'}"),
        ([["guess", 4]], r"solve gave the turn \['guess', 4\]: give a text, or a call such"),
        (None, r"environment Solved: TypeError.*not iterable \(line"),
    ],
)
def test_a_solution_that_is_none_is_refused(turns, evidence):
    solved = type("Solved", (Hunt,), {"solve": lambda **row: turns})
    [found] = found_in(solved, hunt_rows())
    assert found.name in ("oracle", "episode")
    assert re.search(evidence, found.evidence)


@pytest.mark.parametrize(
    ("kind", "rows", "words"),
    [(lambda: None, [{}], "give the class"), (Hunt, [], "rows is empty")],
)
def test_what_is_no_class_or_has_no_rows_is_refused(kind, rows, words):
    with pytest.raises(ValueError, match=words):
        check_environment(kind, rows)
