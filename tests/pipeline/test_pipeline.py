import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from functools import partial

import forked
import pandas as pd
import pytest
from conftest import TINY_SETTINGS, held

from grpo_nb import runs, stages
from grpo_nb.__main__ import main
from grpo_nb.pipeline import checklist
from grpo_nb.pipeline import notebooks as pipeline
from grpo_nb.runs import Run
from grpo_nb.training import read_lines


@pytest.fixture
def again(demo_run, forks, tmp_path, monkeypatch):
    """A copy of the finished run, to write to."""
    shutil.copytree(demo_run.path, tmp_path / "again")
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path))
    return Run("again")


def test_the_summary_says_before_and_after_and_where_things_are(demo_run, capsys):
    pipeline.print_summary(demo_run)
    printed = capsys.readouterr().out
    assert re.search(r"base → merged: .*greedy accuracy .*\d % → \d+\.\d %", printed)
    assert "rewards    passed" in printed
    assert printed.endswith(f"results    {demo_run.path}\n")


def by_functions(name, settings):
    """The checks of stage 01, and the test and verdict of stage 02."""
    start = partial(runs.start, run_name=name, settings=settings, all_stages=True)
    return stages.prepare_data(start("01", profile="tiny-cpu")), *stages.test_rewards(start("02"))


def test_the_functions_of_the_stages_write_what_the_notebooks_write(demo_run, runs_dir):
    """To the byte. The third is run by `train`, in tests/stages/test_ranks.py."""
    checks, test, verdict = by_functions("functions", TINY_SETTINGS)
    assert len(test.baseline.rows) == 4 and verdict.passed
    ours, theirs = Run("functions").manifest(), demo_run.manifest()
    assert [check.name for check in checks] == [line["name"] for line in theirs["01"]["checks"]]
    for stage in ("01", "02"):
        assert ours[stage]["checks"] == theirs[stage]["checks"]
        assert ours[stage]["outputs"] == theirs[stage]["outputs"]


def test_a_task_of_programs_passes_the_test_of_its_rewards(runs_dir):
    small = {"data.max_rows": 40, "data.eval_rows": 8, "rewards.baseline_completions": 4}
    *_, verdict = by_functions("coder", small | {"task": "code", "rewards.baseline_prompts": 4})
    assert verdict.passed, verdict


def test_a_failing_cell_stops_the_run_and_keeps_the_notebook(runs_dir, forks, capsys):
    single = runs_dir / "single.jsonl"
    single.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert main(["run", "--name", "f", "--set", f"data.source={single}"]) == 1
    error, run = capsys.readouterr().err, Run("f")
    entry = run.manifest()["01"]
    said = rf"failed in cell \d+: ValueError: usable rows left of {single}: 1"
    assert re.search(f"01_prepare_data {said}", error) and "Traceback" not in error
    assert entry["status"] == "failed" and re.search(said, entry["error"])
    assert "single.jsonl" in (run / "notebooks/01_prepare_data.ipynb").read_text()
    assert not (run / "notebooks/02_test_rewards.ipynb").exists()


def test_a_run_in_use_is_refused(runs_dir, capsys):
    with held("u", ".pipeline.lock"):
        assert main(["run", "--name", "u"]) == 1
    assert "run 'u' is in use by another process" in capsys.readouterr().err


def test_the_doctor_reports_and_says_what_to_type(capsys, monkeypatch):
    main(["doctor"])
    printed = capsys.readouterr().out
    for line in ("cpu", "gpu", "disk", "memory", "torch", "unsloth", "engine sandbox"):
        assert re.search(rf"^(ok|stop) +{line}", printed, re.MULTILINE)
    monkeypatch.setattr(checklist, "installed_versions", lambda: {"trl": "not installed"})
    assert main(["doctor"]) == 1
    assert "→ make install GPU=" in capsys.readouterr().out


def test_training_is_refused_with_rewards_that_can_be_cheated(again, tmp_path, capsys):
    """Stage 02 finishes and says what fails; notebook 3 ends before it loads the model."""
    sheet, before = tmp_path / "brief.py", (again / "train/metrics.jsonl").read_bytes()
    brief = "rewards.ideal_length_reward.configured(ideal=0, tolerance=1)"
    sheet.write_text(
        "from grpo_nb import rewards\nmath = rewards.PRESETS['math']\n"
        f"reward_funcs = [*math.reward_funcs, {brief}]\n"
        "reward_weights = [*math.reward_weights, 2.0]\n"
    )
    arguments = ["run", "--name", "again", "--from", "02", "--set", f"rewards.preset={sheet}"]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    for said in (
        "the rewards failed their test: nothing written: ''",
        "`ideal_length_reward_ideal_0_tolerance_1` pays 2",
        "run 02_test_rewards.ipynb again, or set force = True",
    ):
        assert said in error
    assert again.state("03").why.startswith("failed: failed in cell")
    assert (again / "train/metrics.jsonl").read_bytes() == before
    assert not json.loads((again / "rewards/report.json").read_text())["passed"]
    assert again.manifest()["02"]["status"] == "done"
    with pytest.raises(pipeline.StageFailed, match="failed their test: nothing written: ''"):
        pipeline.print_summary(again, "02")
    assert "rewards    FAILED: nothing written: ''" in capsys.readouterr().out


def test_sigterm_saves_a_checkpoint_and_the_same_command_goes_on(again):
    """Stage 03 alone, which keeps what was set before, and begins anew."""
    before, set_before = again.manifest(), again.settings()
    command = [*forked.python(), "-m", "grpo_nb", "run", "--name=again", "--only=03"]
    command += ["--set=grpo.max_steps=6", "--set=grpo.learning_rate=2e-3"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    state, tick = again / "progress.json", threading.Event()
    state.unlink()
    with subprocess.Popen(command, **streams) as process:
        while process.poll() is None:
            if state.exists() and json.loads(state.read_text())["done"] >= 2:
                process.terminate()
                break
            tick.wait(0.1)
        out, err = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, out + err
    (stopped,) = {*re.findall(r"the training is kept up to step (\d+)", err)}
    assert "KeyboardInterrupt" not in err
    assert "To go on: python -m grpo_nb run --name again --from 03" in err
    assert 2 <= int(stopped) < 6
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    notebook = (again / "notebooks/03_train_grpo.ipynb").read_text(encoding="utf-8")
    assert f"goes on after step {stopped} of 6" in notebook
    lines = [line["step"] for line in read_lines(again / "train/metrics.jsonl")]
    assert lines == [0, 1, 2, 3, 4, 5, 6, 6], "the first and the last are validations"
    after = again.manifest()
    assert after["02"] == before["02"] and after["03"]["started"] != before["03"]["started"]
    assert again.settings() == set_before | {"grpo.learning_rate": 2e-3, "grpo.max_steps": 6}


DEAF = """
import os, signal, subprocess, sys
from grpo_nb.pipeline import notebooks
from grpo_nb.runs import Run

def deaf(*_):
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print(flush=True)"
    command = [sys.executable, "-c", f"{code}; time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as kernel:
        kernel.stdout.readline()
        while kernel.poll() is None:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                kernel.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                pass
    raise notebooks.StageFailed(f"ended by {kernel.returncode}")

notebooks.execute_notebook, notebooks.SECONDS_TO_STOP = deaf, 0.1
notebooks._execute_stage(Run("deaf"), "03", {})
"""


def test_a_kernel_that_two_signals_do_not_end_is_killed():
    """A signal that comes while it replies may leave it waiting."""
    failed = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, text=True)
    assert "StageFailed: ended by -9" in failed.stderr


def test_a_task_with_images_goes_through_the_four_notebooks(runs_dir, forks):
    short = {"grpo.max_steps": 2, "data.max_rows": 80, "data.eval_rows": 8, "train.eval_prompts": 4}
    short |= {"rewards.baseline_prompts": 4, "evaluate.samples": 1, "export.parity_prompts": 2}
    short |= {"grpo.per_device_train_batch_size": 16, "rewards.baseline_completions": 4}
    run = pipeline.run_pipeline("charts", "tiny-cpu", {"task": "charts", **short})
    assert not run.undone()
    sampled = pd.concat(map(pd.read_parquet, (run / "train/completions").glob("*.parquet")))
    assert len(sampled) == 2 * run.config().step_completions
    assert sampled["images"].str.fullmatch(r"[0-9a-f]{64}").all()
    for notebook in (run / "notebooks").glob("*.ipynb"):
        assert notebook.stat().st_size < 300_000, notebook
