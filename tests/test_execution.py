"""What ends a notebook too early: each ends in a sentence, and no manifest stays at "running"."""

import os
import re
import shutil
import subprocess
import sys

import nbformat
import pytest

from grpo_nb.pipeline import notebooks
from grpo_nb.pipeline.notebooks import StageFailed, execute_notebook
from grpo_nb.runs import PROJECT_ROOT, Run

START = (
    "from grpo_nb import runs\nstage = runs.start_stage('01', run_name, settings, profile=profile)"
)
PARAMETER_CELL = "run_name = ''\nprofile = 'auto'\nsettings = {}"
FINISH = "(stage.run / 'x').touch()\nprint(stage.finish('x'))"


@pytest.fixture
def execute(runs_dir, tmp_path, monkeypatch):
    """Stage 01 with cells of its own, in a kernel of its own."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "r/notebooks").mkdir(parents=True)
    monkeypatch.setattr(notebooks, "PROJECT_ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PROJECT_ROOT)]))

    def run(*cells, **settings):
        book = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
        book.cells = [nbformat.v4.new_code_cell(cell) for cell in (PARAMETER_CELL, *cells)]
        book.cells[0].metadata.tags = ["parameters"]
        nbformat.write(book, tmp_path / "notebooks/01_prepare_data.ipynb")
        parameters = {"run_name": "r", "profile": "tiny-cpu", "settings": settings}
        return execute_notebook(Run("r"), "01", parameters)

    return run


def entry():
    return Run("r").manifest()["01"]


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("import sys; sys.exit()", "ended before its last cell"),
        ("import sys; sys.exit(0)", "ended before its last cell"),
        ("import sys; sys.exit('no rows')", "failed in cell 4: SystemExit: no rows"),
        ("import os; os._exit(3)", "its process ended by itself with exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "its process was killed by SIGKILL .*memory runs"),
        ("import os; os.kill(os.getpid(), 11)", "its process was killed by SIGSEGV"),
        ("import os; os.abort()", "its process was killed by SIGABRT"),
    ],
)
def test_a_notebook_that_ends_early_has_failed_and_says_how(execute, cell, said):
    with pytest.raises(StageFailed) as failed:
        execute(START, cell, FINISH)
    text = str(failed.value)
    assert re.search(f"01_prepare_data .*{said}", text), text
    assert "Traceback" not in text
    assert entry()["status"] == "failed"
    assert re.search(said, entry()["error"])
    if "process" in said:
        assert "--from this stage goes on" in text
    kept = nbformat.read(Run("r") / "notebooks/01_prepare_data.ipynb", 4)
    assert next(cell for cell in kept.cells if START in cell.source).execution_count


def test_a_notebook_that_fails_before_it_begins_leaves_the_result_of_before(execute):
    execute(START, FINISH)
    done = entry()
    assert done["status"] == "done"
    for cell in ("raise ValueError('no')", "import sys; sys.exit()"):
        with pytest.raises(StageFailed):
            execute(cell, START, FINISH)
        assert entry() == done


def test_a_stage_that_fails_again_before_it_wrote_leaves_the_result_of_before(execute):
    begin = START + "\n(stage.run / 'x').write_text('trained')"
    execute(begin, FINISH)
    run = Run("r")
    kept = {path: path.read_bytes() for path in (run / "manifest.json", run / "config.yaml")}
    for cell in ("raise ValueError('no')", "import os; os.kill(os.getpid(), 9)"):
        with pytest.raises(StageFailed, match="before is as it was, and stays its result"):
            execute(START, cell, FINISH, **{"data.eval_rows": 9})
        assert {path: path.read_bytes() for path in kept} == kept
    with pytest.raises(StageFailed):
        execute(START, "(stage.run / 'x').write_text('half')", "1 / 0", FINISH)
    assert entry()["status"] == "failed"


def test_a_typo_in_the_settings_starts_nothing(execute):
    with pytest.raises(StageFailed, match=r"'data.eval_rws': did you mean 'data.eval_rows'"):
        execute(START, FINISH, **{"data.eval_rws": 5})
    assert not (Run("r") / "config.yaml").exists()


@pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap: a full disk")
def test_a_full_disk_is_a_sentence(tmp_path):
    (tmp_path / "small").mkdir()
    sandbox = ["bwrap", "--bind", "/", "/", "--dev", "/dev", "--size", "65536", "--tmpfs"]
    command = [sys.executable, "-m", "grpo_nb", "run", "--profile=tiny-cpu", "--name=r", "--to=01"]
    environment = os.environ | {"GRPO_NB_RUNS": str(tmp_path / "small")}
    done = subprocess.run(
        [*sandbox, str(tmp_path / "small"), *command],
        **{"capture_output": True, "text": True, "env": environment},
    )
    assert done.returncode == 1
    assert re.search(
        r"grpo-nb: 01_prepare_data .*no room to write .*: free some space", done.stderr
    )
    assert "Traceback" not in done.stderr
