"""The environments that are shipped: their rows, who wins them, and who does not."""

import json
import re
from functools import partial

import pytest
from make_environments import ENVIRONMENTS, make_rows

from grpo_nb import sandbox
from grpo_nb.environments import check_rows, findings, load
from grpo_nb.environments.examples.calculator import Calculator
from grpo_nb.environments.examples.guess import Guess
from grpo_nb.environments.examples.wordle import hints
from grpo_nb.environments.play import replay, script
from grpo_nb.environments.scripted import follow, perform
from grpo_nb.pipeline.notebooks import with_full_paths
from grpo_nb.runs import PROJECT_ROOT

ROWS = PROJECT_ROOT / "data/tasks"
PROMPT = [{"role": "user", "content": "Begin."}]
SOME = 8  # rows whose programs are run


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
    expected = 200 if name == "python_sandbox" else 400
    assert len({row["question"] for row in rows}) == len(rows) == expected
    check_rows(load(name), rows)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_solve_wins_every_row_in_one_used_instance(name):
    environment = load(name)
    used = environment.factory()
    for row in read(name)[: SOME if name == "python_sandbox" else None]:
        end = perform(environment, row, partial(follow, environment.solution(row)), instance=used)
        assert (end.reward, end.played.done) == (1.0, True)
        assert not [call for call in end.calls if call.error]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_scripted_policies_find_nothing_wrong(name, monkeypatch):
    monkeypatch.setattr(findings, "PATIENCE", 2.0)
    rows = [{**row, "prompt": [{"role": "user", "content": row["question"]}]} for row in read(name)]
    assert findings.findings(load(name), rows) == []


def test_the_page_explains_every_finding():
    page = (PROJECT_ROOT / "docs/environments.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([a-z ]+)` \|", page, re.M) == [*findings.FIXES]


SHOWN = {
    "calculator": {"a": 47, "b": 38},
    "guess": {"low": 41, "secret": 45},
    "wordle": {"secret": "dab", "clue": "abd"},
}


@pytest.mark.parametrize("name", SHOWN)
def test_the_transcripts_of_the_page_are_what_is_played(name):
    page = (PROJECT_ROOT / "docs/environments.md").read_text(encoding="utf-8")
    section = page.partition(f"### {name}:")[2].partition("\n### ")[0]
    said = re.findall(r"^    assistant  (\w+)\((.*)\)\n    tool       (.*)$", section, re.M)
    calls = [(tool, eval(f"dict({given})")) for tool, given, _ in said]
    end = played(name, SHOWN[name], *calls)
    assert [call.result for call in end.calls] == [result for *_, result in said]
    assert (end.get_reward(), end.done) == (1.0, True)


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


def test_each_reference_passes_its_tests_and_a_constant_does_not():
    for row in read("python_sandbox"):
        space = {}
        exec(row["answer"], space)
        cases = json.loads(row["tests"])["cases"]
        results = [result for _, result in cases]
        assert [space["f"](*arguments) for arguments, _ in cases] == results
        assert max(map(results.count, results)) <= len(results) / 2


@pytest.mark.parametrize(
    ("word", "secret", "said"),
    [
        ("abc", "abc", "a in place, b in place, c in place"),
        ("aab", "abd", "a in place, a absent, b elsewhere"),
        ("baa", "aca", "b absent, a elsewhere, a in place"),
        ("ddd", "abc", "d absent, d absent, d absent"),
    ],
)
def test_a_letter_is_elsewhere_as_often_as_it_is(word, secret, said):
    assert hints(word, secret) == said


def guesses(*words):
    places = ("first", "second", "third")
    return [("guess", dict(zip(places, word, strict=False))) for word in words]


WORD = {"secret": "dab", "clue": "aab"}  # a absent, a in place, b in place


@pytest.mark.parametrize(
    ("words", "earned"),
    [
        ([], 0.0),
        (["cab"] * 4, 0.1),  # two letters in place, four times
        (["aab"] * 4, 0.0),  # known not to be it
        (["bab", "cab", "dab"], 1.0),
        (["bab", "cab"], 0.2),
        (["da", "xyz"], 0.0),  # no words
    ],
)
def test_a_guess_is_paid_for_what_it_makes_of_the_hints(words, earned):
    assert played("wordle", WORD, *guesses(*words)).get_reward() == pytest.approx(earned)


def test_four_guesses_are_the_end_and_what_is_no_word_is_none_of_them():
    words = guesses("xab", *["cab"] * 4, "dab")  # in one turn: turns have a limit of their own
    turn = [{"name": name, "arguments": given} for name, given in words]
    end = replay(load("wordle"), {**WORD, "prompt": PROMPT}, script([turn]))
    first, *others, last = end.calls
    assert first.error == "guess: first: input should be 'a', 'b', 'c' or 'd'"
    assert {call.result for call in others} == {"c absent, a in place, b in place"}
    assert "finished" in last.result and end.get_reward() == pytest.approx(0.1)


MEAN = {"tests": json.dumps({"function": "f", "cases": [[[[1, 3]], 2], [[[]], 0]]})}
WRONG = "def f(numbers):\n    return sum(numbers) // len(numbers)"
RIGHT = "def f(numbers):\n    return sum(numbers) // max(1, len(numbers))"


def test_a_program_is_run_read_corrected_and_handed_in():
    end = played(
        "python_sandbox",
        MEAN,
        ("run", {"code": f"{WRONG}\nprint(f([1, 3]))\nprint(f([]))"}),
        ("run", {"code": f"{RIGHT}\nprint(f([]))"}),
        ("submit", {"code": RIGHT}),
        ("submit", {"code": WRONG}),
    )
    said = [call.result for call in end.calls]
    assert said[0].startswith("the program raised ZeroDivisionError")
    assert said[1:3] == ["0", "handed in"] and "finished" in said[3]
    assert end.get_reward() == 1


@pytest.mark.parametrize("code", [WRONG, "import sys\nsys.exit(0)"])
def test_what_does_not_pass_every_test_earns_nothing(code):
    end = played("python_sandbox", MEAN, ("submit", {"code": code}))
    assert (end.get_reward(), end.done, end.calls[0].result) == (0.0, True, "handed in")


def test_a_long_output_is_shown_by_its_start_and_end():
    end = played(
        "python_sandbox", MEAN, ("run", {"code": "print(*range(9999))"}), ("run", {"code": ""})
    )
    long, nothing = (call.result for call in end.calls)
    assert long.startswith("0 1 2") and long.endswith("9998") and len(long) < 420
    assert nothing == "nothing was printed"


def test_without_a_sandbox_nothing_is_sampled(monkeypatch):
    def none(backend="auto"):
        raise RuntimeError("no sandbox for generated code")

    monkeypatch.setattr(sandbox, "choose_backend", none)
    with pytest.raises(ValueError, match="no sandbox for generated code"):
        check_rows(load("python_sandbox"), [MEAN])


def test_a_class_in_a_file_is_found_from_where_the_command_stands(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("class Guess: pass", encoding="utf-8")
    (tmp_path / "guess").mkdir()  # a folder that has the example's name
    monkeypatch.chdir(tmp_path)
    given = {"data.environment": "mine.py:Guess", "data.source": "guess", "model.model_path": None}
    assert with_full_paths(given) == {**given, "data.environment": f"{tmp_path}/mine.py:Guess"}
    assert with_full_paths({"data.environment": "guess"}) == {"data.environment": "guess"}
