"""The environments that are shipped: their rows, who wins them, and who does not."""

import json
import random
from importlib.util import module_from_spec, spec_from_file_location
from statistics import mean

import pytest

from grpo_nb.environments import check_rows, load
from grpo_nb.environments.examples.wordle import hints
from grpo_nb.environments.play import replay, script
from grpo_nb.rewards import sandbox
from grpo_nb.runs import PROJECT_ROOT

ROWS = PROJECT_ROOT / "data/tasks"
PROMPT = [{"role": "user", "content": "Begin."}]
SOME = 8  # rows whose programs are run


def read(name):
    lines = (ROWS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def turns_of(*calls):
    """Each call: the tool's name, and its one argument by name."""
    return script([{"name": name, "arguments": given} for name, given in calls])


def played(name, row, *calls):
    return replay(load(name), {**row, "prompt": PROMPT}, turns_of(*calls))


@pytest.fixture(scope="module")
def maker():
    spec = spec_from_file_location("maker", PROJECT_ROOT / "data/make_more_environments.py")
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return {"wordle": made.wordle_rows, "python_sandbox": made.sandbox_rows}


@pytest.mark.parametrize("name", ["wordle", "python_sandbox"])
def test_the_rows_are_what_the_script_makes(name, maker):
    rows = read(name)
    assert rows == maker[name]()
    assert len({row["question"] for row in rows}) == len(rows)
    check_rows(load(name), rows)


@pytest.mark.parametrize(("name", "some"), [("wordle", None), ("python_sandbox", SOME)])
def test_solve_wins_every_row(name, some):
    environment = load(name)
    for row in read(name)[:some]:
        end = replay(environment, {**row, "prompt": PROMPT}, script(environment.solution(row)))
        assert (end.score(), end.done) == (1.0, True)
        assert not [call for call in end.calls if call.error]


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
        ("abc", "abc", "in place, in place, in place"),
        ("cab", "abc", "elsewhere, elsewhere, elsewhere"),
        ("aab", "abd", "in place, absent, elsewhere"),
        ("baa", "aca", "absent, elsewhere, in place"),
        ("ddd", "abc", "absent, absent, absent"),
    ],
)
def test_a_letter_is_elsewhere_as_often_as_it_is(word, secret, said):
    assert ", ".join(hints(word, secret)) == said


WORD = {"letters": "abcd", "secret": "dab"}


@pytest.mark.parametrize(
    ("words", "earned"),
    [
        ([], 0.0),
        (["dac"] * 5, 0.0),  # two letters in place, five times
        (["aab", "cab", "dab"], 1.0),
        (["aab", "cab", "bbb"], 0.1),  # the last one could not have been it
        (["aab", "cab"], 0.1),
        (["abc", "abcd", "xyz", ""], 0.0),  # no words
    ],
)
def test_a_guess_is_paid_for_what_it_makes_of_the_hints(words, earned):
    end = played("wordle", WORD, *[("guess", {"word": word}) for word in words])
    assert end.score() == pytest.approx(earned)


def test_five_guesses_are_the_end_and_what_is_no_word_is_none_of_them():
    words = ["abcd", *["dac"] * 5, "dab"]
    end = played("wordle", WORD, *[("guess", {"word": word}) for word in words])
    first, *others, last = end.calls
    assert first.error == "ValueError: a word is 3 letters, each one of a, b, c, d"
    assert {call.result for call in others} == {"d in place, a in place, c absent"}
    assert "finished" in last.result and end.score() == 0


def test_chance_seldom_finds_a_word():
    rng, scores = random.Random(0), []
    for row in read("wordle"):
        words = ["".join(rng.choices(row["letters"], k=3)) for _ in range(5)]
        scores.append(played("wordle", row, *[("guess", {"word": w}) for w in words]).score())
    assert 0.05 < mean(scores) < 0.15


MEAN = {
    "tests": json.dumps({"function": "f", "cases": [[[[1, 3]], 2], [[[]], 0]]}),
}
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
    assert end.score() == 1


@pytest.mark.parametrize(
    "code",
    [
        WRONG,
        "def f(numbers):\n    return 0",
        "print('2')",
        "import sys\nsys.exit(0)",
        "class Same:\n    def __eq__(self, other): return True\ndef f(numbers): return Same()",
        "not python",
    ],
)
def test_what_does_not_pass_every_test_earns_nothing(code):
    end = played("python_sandbox", MEAN, ("submit", {"code": code}))
    assert (end.score(), end.done, end.calls[0].result) == (0.0, True, "handed in")


def test_no_program_reaches_a_file_outside(tmp_path):
    kept = tmp_path / "kept.txt"
    kept.write_text("secret", encoding="utf-8")
    write = f"open({str(kept)!r}, 'w').write('gone')\ndef f(numbers): return 0"
    end = played(
        "python_sandbox",
        MEAN,
        ("run", {"code": f"print(open({str(kept)!r}).read())"}),
        ("run", {"code": write}),
        ("submit", {"code": write}),
    )
    read_it, wrote = (call.result for call in end.calls[:2])
    assert "secret" not in read_it and wrote.startswith("the program raised")
    assert kept.read_text(encoding="utf-8") == "secret" and end.score() == 0


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
