"""What `run` and `--dry-run` say of a file of one's own before anything starts."""

import re

import pytest

from grpo_nb.__main__ import main

CITIES = [("Which city is the capital of France?", "Paris"), ("And that of Spain?", "Madrid")]
SUMS = [(f"What is {i} + 4?", str(i + 4)) for i in range(30)]


def table(header, rows, mark=","):
    quoted = (['"' + cell.replace('"', '""') + '"' for cell in row] for row in rows)
    return "\n".join([mark.join(header), *(mark.join(cells) for cells in quoted)])


def said(capsys, source, *more, command="--dry-run"):
    arguments = ["run", "--name", "mine", "--profile", "tiny-cpu", command]
    code = main([*filter(None, arguments), "--set", f"data.source={source}", *more])
    printed = capsys.readouterr()
    return code, printed.err + printed.out


@pytest.mark.parametrize(
    ("header", "rows", "problem"),
    [
        (["Nr", "Aufgabe"], SUMS, r"\(data.question_column\) 'question': known names: Nr, Aufgabe"),
        (
            ["question", "answer"],
            CITIES,
            "(?s)2 of 2 rows of .* cannot be used.* row 1, .* 'Paris' holds no number. set "
            "data.answer_format .* data.answer_kind to its kind, with a rewards.preset",
        ),
        (["question", "answer"], [], "holds no rows: give a data.source that does"),
    ],
)
def test_a_file_whose_first_rows_do_not_fit_is_refused_before_anything_starts(
    runs_dir, capsys, header, rows, problem
):
    (runs_dir / "own rows.csv").write_text(table(header, rows, ";"))
    for command in ("--dry-run", ""):
        code, printed = said(capsys, runs_dir / "own rows.csv", command=command)
        assert code == 2 and re.search(problem, printed), printed
    assert [file.name for file in runs_dir.iterdir()] == ["own rows.csv"]


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("data.source=nowhere.csv", "there is no .*nowhere.csv; name a file that is there"),
        ("data.question_column=questoin", "_column.* 'questoin': did you mean 'question'"),
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
