"""What a run takes and refuses before it starts, and what ends one of its notebooks too early."""

import re

import nbformat
import pytest

from grpo_nb.__main__ import main
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline import notebooks
from grpo_nb.pipeline.notebooks import StageFailed, execute_notebook
from grpo_nb.runs import Run, config

RUN = "profile: tiny-cpu\ndata.max_rows: 80\ndata.eval_rows: 16\ngrpo.learning_rate: 1e-4\n"
START = "from grpo_nb import runs\nstage = runs.start('01', run_name, settings, profile=profile)"
PARAMETER_CELL = "run_name = ''\nprofile = 'auto'\nsettings = {}"
FINISH = "(stage.run / 'x').touch()\nprint(stage.finish('x'))"


def write(folder, text, name="mine.yaml"):
    (folder / name).write_text(text)
    return str(folder / name)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("train:\n\tmax_steps: 3", "line 2, column 1"),
        ("seed: [1", "mine.yaml cannot be read: while parsing a flow sequence"),
        ("- seed", "write one `setting: value` per line"),
        ("grpo.max_stepz: 3", "'grpo.max_stepz': did you mean 'grpo.max_steps'"),
        ("grpo.max_steps:", "grpo.max_steps = None"),
        ("profile:", "unknown profile None"),
        ("name:", "run_name ''"),
        ("task: 3", "unknown task 3"),
        ("trl: {epsilon: 1}", "unknown setting 'trl'"),
        ("grpo.max_grad_norm: .inf", "grpo.max_grad_norm = inf: Input should be a finite number"),
        ("name: x\nprofile: tiny", "'tiny': did you mean 'tiny-cpu'"),
        ("grpo.epsilom: 0.2", "did you mean 'grpo.epsilon'"),
        (["--from", "03", "--to", "02", "--name", "x"], "--from must not come after --to"),
        (["--to", "5"], "unknown stage '5'"),
        (["--from", "03", "--name", "x"], "no config.yaml: run 01_prepare_data first"),
        (["--set", "grpo.betta=1"], "unknown setting 'grpo.betta'"),
        (["--set", "rewards.preset=none.py"], "none.py does not exist"),
        (["--set", "rewards.reward_weights=1, 2"], "write 4 numbers"),
        (["--name", ""], "run_name ''"),
        (["--name", "a\nb"], "run_name 'a\\nb'"),
        (["--profile", ""], "unknown profile ''"),
        (["-f", "no.yaml"], "No such file or directory: 'no.yaml'"),
        (["--set", "grpo.beta"], "--set 'grpo.beta': write NAME=VALUE"),
        (["--only", "03"], "a run that begins with stage 03 exists: give its --name"),
        (["--only", "03", "--from", "02"], "--only 03 runs one stage"),
        (["--set", "export.gguf=q4_0"], "'q4_0': did you mean 'q8_0'"),
        (["--set", "rewards.reward_weights=1,a,1,1"], "write 4 numbers"),
        ("grpo: 3", "unknown setting 'grpo'"),
        ("grid: {seed: [1]}", "is a file of a sweep: python -m grpo_nb sweep"),
        ("settings: {seed: 1}", "write each setting by itself"),
    ],
)
def test_wrong_run_files_and_arguments_start_nothing(runs_dir, capsys, given, message):
    arguments = given if isinstance(given, list) else ["-f", write(runs_dir, given)]
    assert main(["run", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in runs_dir.iterdir()} <= {"mine.yaml"}


def test_the_plan_says_where_each_setting_comes_from_and_starts_nothing(runs_dir, capsys):
    text = "name: mine\nprofile: l4-24gb\ngrpo.beta: 0.1\nseed: 1\n"
    arguments = ["run", "-f", write(runs_dir, text, "r.yaml"), "--set", "seed=4", "--dry-run"]
    assert main([*arguments, "--to", "03"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for said in ("seed 4 set", "grpo.beta 0.1 set", "lora.r 32 profile", "02_test_rewards, 03_tr"):
        assert said in printed
    assert "grpo.temperature" not in printed, "which is the default"
    assert "04_merge_and_infer" not in printed
    assert [path.name for path in runs_dir.iterdir()] == ["r.yaml"]


def test_the_command_line_comes_over_the_file_and_values_get_their_types(runs_dir):
    file = write(runs_dir, f"{RUN}grpo.epsilon: 1e-3\nmodel: {{fast_inference: off}}\n")
    more = ["grpo.beta=0.2", "data.max_rows=9", "grpo.epsilon_high=0.28"]
    name, *planned = notebooks.planned_run(file, None, None, more)
    assert (name, planned[0]) == ("mine", "tiny-cpu")
    _, settings = notebooks.resolve_run(Run(name), *planned)
    assert settings == {
        **{"data.max_rows": 9, "data.eval_rows": 16, "grpo.learning_rate": 1e-4, "grpo.beta": 0.2},
        **{"grpo.epsilon": 1e-3, "grpo.epsilon_high": 0.28, "model.fast_inference": "off"},
    }
    assert notebooks.planned_run(file, "other", "l4-24gb", [])[:2] == ("other", "l4-24gb")


def test_the_same_file_goes_on_from_a_later_stage(runs_dir, capsys):
    arguments = ["run", "-f", write(runs_dir, RUN), "--from", "02"]
    _, profile, settings = notebooks.planned_run(arguments[2], None, None, [])
    Run("mine").write_config(config.resolve(profile, settings))
    Run("mine").record("01", {"status": "done", "outputs": {}})
    assert main([*arguments, "--dry-run"]) == 0
    assert main([*arguments, "--set", "data.max_rows=81"]) == 2
    assert "data.max_rows belongs to stage 01, which --from 02 does" in capsys.readouterr().err
    assert main([*arguments, "--profile", "l4-24gb"]) == 2
    assert "--profile l4-24gb: the run has tiny-cpu" in capsys.readouterr().err
    assert main([*arguments, "--from", "04"]) == 2
    assert "needs 02_test_rewards, which is not started" in capsys.readouterr().err


@pytest.fixture
def execute(runs_dir, forks, tmp_path, monkeypatch):
    """Stage 01 with cells of its own, in a kernel of its own."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "r/notebooks").mkdir(parents=True)
    monkeypatch.setattr(notebooks, "PROJECT_ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT_ROOT))

    def run(*cells, **settings):
        book = nbformat.v4.new_notebook(metadata={"language_info": {"name": "python"}})
        book.cells = [nbformat.v4.new_code_cell(cell) for cell in (PARAMETER_CELL, *cells)]
        book.cells[0].metadata.tags = ["parameters"]
        nbformat.write(book, tmp_path / "notebooks/01_prepare_data.ipynb")
        parameters = {"run_name": "r", "profile": "tiny-cpu", "settings": settings}
        return execute_notebook(Run("r"), "01", parameters)

    return run


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("import sys; sys.exit()", "ended before its last cell"),
        ("import os; os.kill(os.getpid(), 9)", "its kernel died: .* memory .* before is kept"),
    ],
)
def test_a_notebook_that_ends_early_has_failed_and_says_how(execute, cell, said):
    with pytest.raises(StageFailed) as failed:
        execute(START, cell, FINISH)
    assert re.search(f"01_prepare_data .*{said}", str(failed.value)), failed.value
    entry = Run("r").manifest()["01"]
    assert entry["status"] == "failed" and re.search(said, entry["error"])
    kept = nbformat.read(Run("r") / "notebooks/01_prepare_data.ipynb", 4)
    assert next(cell for cell in kept.cells if START in cell.source).execution_count


def test_a_notebook_that_fails_before_it_begins_leaves_the_result_of_before(execute):
    done = {"status": "done", "seconds": 1.0, "outputs": {}}
    Run("r").record("01", done)
    with pytest.raises(StageFailed, match=r"'data.eval_rws': did you mean 'data.eval_rows'"):
        execute(START, FINISH, **{"data.eval_rws": 5})
    assert Run("r").manifest()["01"] == done
    assert not (Run("r") / "config.yaml").exists()
