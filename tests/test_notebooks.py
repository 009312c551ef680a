"""The rules every notebook keeps, nbval over them, and the Colab cell."""

import ast
import os
import re
import subprocess
import sys
import types

import nbformat
import papermill
import pytest
import refresh
from conftest import TINY_SETTINGS

from grpo_nb import config
from grpo_nb.pipeline import QUIET
from grpo_nb.runs import NOTEBOOKS, PROJECT_ROOT, project_path

FOLDER = project_path("notebooks")
ALL = {**NOTEBOOKS, "05": refresh.COMPARE}  # the last is no stage of a run
by_stage = pytest.mark.parametrize("stage", NOTEBOOKS)
every_notebook = pytest.mark.parametrize("stage", ALL)
PARAMETER = re.compile(r'(\w+): (str|int|float|bool) = ("\w*"|-?\d+|True|False)  # \S.*')


def path_of(stage):
    return FOLDER / f"{ALL[stage]}.ipynb"


def read(stage):
    return nbformat.read(path_of(stage), as_version=4)


def code_cells(stage):
    return [cell for cell in read(stage).cells if cell.cell_type == "code"]


def has_tag(cell, tag):
    return tag in cell.metadata.get("tags", [])


def tagged(stage, tag):
    (cell,) = [cell for cell in code_cells(stage) if has_tag(cell, tag)]
    return cell


@by_stage
def test_the_parameters_are_the_settings_of_the_stage(stage):
    lines = [PARAMETER.fullmatch(line) for line in tagged(stage, "parameters").source.splitlines()]
    names = {match[1] for match in lines}
    assert len(names) == len(lines) <= 30
    of_stage = [name for name in config.setting_names() if config.stage_of(name) == stage]
    settings = {name.rpartition(".")[2] for name in of_stage if not config.is_rare(name)}
    more = {"more"} if any(map(config.is_rare, of_stage)) else set()
    assert names - settings == {"run_name", "profile" if stage == "01" else "force"} | more
    assert settings <= names
    for match in lines:
        if match[1] in settings:
            assert match[3] in ('"auto"', "-1")
    found = papermill.inspect_notebook(str(path_of(stage)))
    assert set(found) == names, "papermill does not see all of them"


def test_the_comparison_takes_a_prefix_and_shows_tables_and_curves():
    (line,) = tagged("05", "parameters").source.splitlines()
    assert PARAMETER.fullmatch(line)[1] == "prefix"
    assert list(papermill.inspect_notebook(str(path_of("05")))) == ["prefix"]
    outputs = [output for cell in code_cells("05") for output in cell.outputs]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    assert "compare-000" in str(outputs)


@every_notebook
def test_cells_are_few_short_and_thin(stage):
    cells = code_cells(stage)
    assert len(cells) <= 25
    for cell in cells:
        longest = 30 if has_tag(cell, "parameters") else 15
        assert len(cell.source.splitlines()) <= longest
        nodes = list(ast.walk(ast.parse(cell.source)))
        assert not [node for node in nodes if isinstance(node, ast.Global | ast.Try)]
        logic = ast.FunctionDef | ast.ClassDef | ast.Lambda
        if not has_tag(cell, "your-reward-here"):
            assert not [node for node in nodes if isinstance(node, logic)]


@every_notebook
def test_they_are_committed_executed_without_machine_paths_or_widget_state(stage):
    notebook, text = read(stage), path_of(stage).read_text(encoding="utf-8")
    assert len(text) < 300_000
    assert "widgets" not in notebook.metadata
    for place in (str(PROJECT_ROOT), "/home/", "/root/", "/tmp/", "/Users/"):
        assert place not in text
    counts = [cell.execution_count for cell in code_cells(stage)]
    assert counts == list(range(1, len(counts) + 1))
    errors = [o for cell in code_cells(stage) for o in cell.outputs if o.output_type == "error"]
    assert not errors


@every_notebook
def test_stored_outputs_belong_to_the_source(stage):
    notebook = read(stage)
    stored = notebook.metadata["grpo_nb"]["source_sha256"]
    assert stored == refresh.source_digest(notebook), "run `make notebooks`"


def test_the_committed_run_learnt():
    text = " ".join(str(cell.outputs) for cell in code_cells("04"))
    assert "merged" in text
    outputs = [output for cell in code_cells("03") for output in cell.outputs]
    assert [output for output in outputs if "image/png" in output.get("data", {})]


@every_notebook
def test_address_and_badge_follow_from_pyproject(stage):
    notebook, url = read(stage), refresh.project_url()
    assert f'PROJECT_URL = "{url}"' in tagged(stage, "setup").source
    assert refresh.badge(url, ALL[stage]) in notebook.cells[0].source
    assert f"[glossary]({url}/blob/main/docs/glossary.md)" in notebook.cells[-1].source
    refresh.set_url(notebook, "https://github.com/someone/else", ALL[stage])
    assert 'PROJECT_URL = "https://github.com/someone/else"' in notebook.cells[1].source
    assert "/github/someone/else/blob/main/notebooks/" in notebook.cells[0].source
    assert "(https://github.com/someone/else/blob/main/docs/" in notebook.cells[-1].source
    assert not [cell for cell in notebook.cells if url in cell.source]


@every_notebook
def test_each_says_first_what_the_reader_will_know_and_last_what_to_look_at(stage):
    prose = [cell.source for cell in read(stage).cells if cell.cell_type == "markdown"]
    assert "**At the end you will know**" in prose[0]
    assert prose[-1].startswith("## What to look at")
    assert max(len(line) for text in prose for line in text.splitlines() if "](" not in line) <= 100
    assert max(len(text.splitlines()) for text in prose[1:-1]) <= 12, "a wall of text"


def test_the_setup_cell_does_nothing_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(tagged("01", "setup").source, {})
    assert not list(tmp_path.iterdir())


def test_the_setup_cell_clones_and_installs_on_colab(tmp_path, monkeypatch):
    """A stand-in for google.colab; git really clones, from a local copy; pip is recorded."""
    origin = tmp_path / "origin"
    (origin / "grpo_nb").mkdir(parents=True)
    (origin / "requirements.txt").write_text("unsloth\n")
    (origin / "grpo_nb" / "__init__.py").write_text("cloned = True\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(origin)]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/installed\n')
    python.chmod(0o755)
    colab = tmp_path / "content"
    colab.mkdir()
    monkeypatch.chdir(colab)
    monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{origin}.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", refresh.project_url())
    exec(tagged("01", "setup").source, {})
    assert (tmp_path / "installed").read_text() == "-m pip install -q -r project/requirements.txt\n"
    found = subprocess.run(
        ["python3", "-c", f"import sys; sys.path.insert(0, {sys.path[0]!r}); import grpo_nb; "
         "print(grpo_nb.cloned)"],
        capture_output=True, text=True, cwd=colab,
    )  # fmt: skip
    assert found.stdout == "True\n"


def test_nbval_passes_over_all_four(tmp_path):
    """In order, each in its own kernel, with the outputs of the marked cells compared."""
    settings = {name: value for name, value in TINY_SETTINGS.items() if name != "data.eval_rows"}
    prepared = []
    for stage in NOTEBOOKS:
        target = tmp_path / path_of(stage).name
        parameters = {"run_name": "nbval"} | config.to_parameters(stage, settings)
        papermill.execute_notebook(
            path_of(stage), target, parameters=parameters, prepare_only=True, progress_bar=False
        )
        prepared.append(str(target))
    environment = os.environ | QUIET | {"GRPO_NB_RUNS": str(tmp_path / "runs")}
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--nbval-lax", "-q", *prepared]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-3000:]
    cells = [cell for stage in NOTEBOOKS for cell in code_cells(stage)]
    assert len([cell for cell in cells if has_tag(cell, "nbval-check-output")]) >= 5
