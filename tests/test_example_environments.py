"""The environments that are shipped: their rows, who wins them, and who does not."""

import itertools
import json
import random
import re
from importlib.util import module_from_spec, spec_from_file_location
from statistics import mean

import pytest

from grpo_nb.environments import check_rows, findings, load
from grpo_nb.environments.examples.wordle import hints
from grpo_nb.environments.play import replay, script
from grpo_nb.pipeline.notebooks import with_full_paths
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
    assert len({row["question"] for row in rows}) == len(rows) == {"wordle": 400}.get(name, 200)
    check_rows(load(name), rows)


@pytest.mark.parametrize(("name", "some"), [("wordle", None), ("python_sandbox", SOME)])
def test_solve_wins_every_row(name, some):
    environment = load(name)
    for row in read(name)[:some]:
        end = replay(environment, {**row, "prompt": PROMPT}, script(environment.solution(row)))
        assert (end.get_reward(), end.done) == (1.0, True)
        assert not [call for call in end.calls if call.error]


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
        ("cab", "abc", "c elsewhere, a elsewhere, b elsewhere"),
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
        (["bab"] * 4, 0.1),
        (["aab"] * 4, 0.0),  # known not to be it
        (["bab", "cab", "dab"], 1.0),
        (["bab", "cab"], 0.2),
        (["bab", "cab", "bbb", "ddd"], 0.2),
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


def test_chance_finds_few_words_and_reasoning_finds_them_all():
    words = ["".join(letters) for letters in itertools.product("abcd", repeat=3)]
    rng, lucky, reasoned = random.Random(0), [], []
    for row in read("wordle")[:100]:
        lucky.append(played("wordle", row, *guesses(*rng.choices(words, k=4))).get_reward())
        left, said = words, [row["clue"]]
        while said[-1] != row["secret"]:
            wanted = hints(said[-1], row["secret"])
            left = [word for word in left if hints(said[-1], word) == wanted]
            said.append(left[0])
        reasoned.append(played("wordle", row, *guesses(*said[1:])).found)
    assert mean(lucky) < 0.2 and mean(reasoned) > 0.95


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
    assert end.get_reward() == 1


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
    assert (end.get_reward(), end.done, end.calls[0].result) == (0.0, True, "handed in")


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
    assert kept.read_text(encoding="utf-8") == "secret" and end.get_reward() == 0


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
    monkeypatch.chdir(tmp_path)
    given = {"data.environment": "mine.py:Guess", "data.source": "guess", "model.model_path": None}
    assert with_full_paths(given) == {**given, "data.environment": f"{tmp_path}/mine.py:Guess"}
    assert with_full_paths({"data.environment": "guess"}) == {"data.environment": "guess"}
