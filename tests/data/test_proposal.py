"""What `run` and `--dry-run` say of a file of one's own before anything starts."""

import re
import shlex

import pytest

from grpo_nb.__main__ import main, parse_arguments

CITIES = [("Which city is the capital of France?", "Paris"), ("And that of Spain?", "Madrid")]
SUMS = [(f"What is {i} + 4?", str(i + 4)) for i in range(30)]
OBJECTS = [("Ann is 7. Give name and age.", '{"name": "Ann", "age": 7}')] * 2
BOXED = [(question, rf"so it is \boxed{{{answer}}}") for question, answer in SUMS]


def table(header, rows, mark=","):
    quoted = (['"' + cell.replace('"', '""') + '"' for cell in row] for row in rows)
    return "\n".join([mark.join(header), *(mark.join(cells) for cells in quoted)])


def said(capsys, source, *more, command="--dry-run"):
    arguments = ["run", "--name", "mine", "--profile", "tiny-cpu", command]
    code = main([*filter(None, arguments), "--set", f"data.source={source}", *more])
    printed = capsys.readouterr()
    return code, printed.err + printed.out


FILES = {
    "texts under other names": (
        table(["id", "prompt_text", "gold"], [(str(i), *row) for i, row in enumerate(CITIES)]),
        r"no column 'question'; did you mean 'prompt_text'\? it has 'id', 'prompt_text', 'gold'",
        {"question_column": "prompt_text", "answer_column": "gold", "answer_kind": "text"},
        "qa",
    ),
    "names in another language, boxed answers": (
        table(["Nr", "Aufgabe", "Ergebnis"], [(str(i), *row) for i, row in enumerate(BOXED)], ";"),
        r"no column 'question'; it has 'Nr', 'Aufgabe', 'Ergebnis'",
        {"question_column": "Aufgabe", "answer_column": "Ergebnis", "answer_format": "boxed"},
        None,
    ),
    "another kind of answer": (
        table(["question", "answer"], OBJECTS),
        r"2 of the first 2 rows cannot be used: .*'Ann', 'age': 7|holds no number",
        {"answer_kind": "json"},
        "json_extraction",
    ),
    "several likely names": (
        table(["problem", "input", "answer"], [(q, "x", a) for q, a in SUMS]),
        "'problem' and 'input' could each take its place",
        {"question_column": "problem"},
        None,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_whole_command_is_proposed_and_fits(runs_dir, capsys, name):
    text, problem, columns, preset = FILES[name]
    path = runs_dir / "own rows.csv"
    path.write_text(text)
    for command in ("--dry-run", ""):  # nor does it start
        code, printed = said(capsys, path, command=command)
        assert code == 2 and re.search(problem, printed), printed
    proposed = shlex.split(printed.splitlines()[-1])[3:]
    values = dict(pair.split("=", 1) for pair in parse_arguments(proposed).assignments)
    assert {f"data.{k}": v for k, v in columns.items()}.items() <= values.items()
    assert values.get("rewards.preset") == preset and values["rewards.form"]
    assert main([*proposed, "--dry-run"]) == 0
    assert [file.name for file in runs_dir.iterdir()] == ["own rows.csv"]


def test_a_preset_that_cannot_read_the_answers_is_named(runs_dir, capsys):
    (runs_dir / "rows.csv").write_text(table(["question", "answer"], CITIES))
    code, printed = said(capsys, runs_dir / "rows.csv", "--set", "data.answer_kind=text")
    problem = "the preset 'math' cannot read these answers: the reference answer 'Paris' does not"
    assert code == 2 and problem in printed and "--set rewards.preset=qa" in printed


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("data.source=nowhere.csv", "there is no .*nowhere.csv; name a file that is there"),
        ("data.question_column=questoin", "has no column 'questoin'; did you mean 'question'"),
        ("model.model_path=data/tiny_bas", "data/tiny_bas holds no config.json"),
        ("model.model_path=no/such/folder", "no/such/folder holds no config.json"),
        ("rewards.cases=no.jsonl", "no.jsonl does not exist"),
    ],
)
def test_what_is_missing_is_said_before_anything_starts(runs_dir, capsys, setting, problem):
    (runs_dir / "rows.csv").write_text(table(["question", "answer"], SUMS))
    code, printed = said(capsys, runs_dir / "rows.csv", "--set", setting)
    assert code == 2 and re.search(problem, printed), printed


def test_a_few_faulty_rows_and_what_is_not_a_file_are_left_to_notebook_1(runs_dir, capsys):
    (runs_dir / "rows.csv").write_text(table(["question", "answer"], [*CITIES[:1], *SUMS]))
    for source in (runs_dir / "rows.csv", "openai/gsm8k", "code"):
        code, printed = said(capsys, source)
        assert code == 0, printed
