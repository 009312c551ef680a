"""What `run` and `--dry-run` say of a file of one's own before anything starts."""

import re

import pytest

from grpo_nb.__main__ import main

CITIES = [("Which city is the capital of France?", "Paris"), ("And that of Spain?", "Madrid")]
SUMS = [(f"What is {i} + 4?", str(i + 4)) for i in range(30)]


def write(path, header, rows):
    path.write_text("\n".join([header, *(f"{question},{answer}" for question, answer in rows)]))


def said(capsys, source, *more, command="--dry-run"):
    arguments = ["run", "--name", "mine", "--profile", "tiny-cpu", command]
    code = main([*filter(None, arguments), "--set", f"data.source={source}", *more])
    printed = capsys.readouterr()
    return code, printed.err + printed.out


@pytest.mark.parametrize(
    ("header", "rows", "setting", "problem"),
    [
        ("Nr,Aufgabe", SUMS, "", r"\(data.question_column\) 'question': known names: Nr, Aufgabe"),
        (
            "question,answer",
            CITIES,
            "",
            "(?s)2 of 2 rows .* 'Paris' holds no number. set",
        ),
        ("question,answer", SUMS, "data.source=nowhere.csv", "there is no .*nowhere.csv; name a"),
        (
            "question,answer",
            SUMS,
            "model.model_name=data/tiny_bas",
            "holds no config.json",
        ),
        ("question,answer", SUMS, "rewards.cases=no.jsonl", "no.jsonl does not exist"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    runs_dir, capsys, header, rows, setting, problem
):
    write(runs_dir / "own rows.csv", header, rows)
    more = ["--set", setting] if setting else []
    for command in ("--dry-run", ""):
        code, printed = said(capsys, runs_dir / "own rows.csv", *more, command=command)
        assert code == 2 and re.search(problem, printed), printed
    assert [file.name for file in runs_dir.iterdir()] == ["own rows.csv"]


def test_a_few_faulty_rows_and_what_is_not_a_file_are_left_to_notebook_1(runs_dir, capsys):
    write(runs_dir / "rows.csv", "question,answer", [*CITIES[:1], *SUMS])
    for source in (runs_dir / "rows.csv", "openai/gsm8k", "code"):
        code, printed = said(capsys, source)
        assert code == 0, printed
