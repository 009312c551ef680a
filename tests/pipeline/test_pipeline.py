import json
import re
import shutil
import signal
import subprocess
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


def test_the_functions_of_the_stages_write_what_the_notebooks_write(demo_run, runs_dir):
    """To the byte. The third is run by `train`, in tests/stages/test_ranks.py."""
    start = partial(runs.start, run_name="functions", settings=TINY_SETTINGS, all_stages=True)
    checks = stages.prepare_data(start("01", profile="tiny-cpu"))
    test, verdict = stages.test_rewards(start("02"))
    assert len(test.baseline.rows) == 4 and verdict.passed
    ours, theirs = Run("functions").manifest(), demo_run.manifest()
    assert [check.name for check in checks] == [line["name"] for line in theirs["01"]["checks"]]
    for stage in ("01", "02"):
        assert ours[stage]["checks"] == theirs[stage]["checks"]
        assert ours[stage]["outputs"] == theirs[stage]["outputs"]


def test_a_task_of_programs_passes_the_test_of_its_rewards(runs_dir):
    small = {"data.max_rows": 40, "data.eval_rows": 8, "rewards.baseline_completions": 4}
    small |= {"task": "code", "rewards.baseline_prompts": 4}
    start = partial(runs.start, run_name="coder", settings=small, all_stages=True)
    stages.prepare_data(start("01", profile="tiny-cpu"))
    _, verdict = stages.test_rewards(start("02"))
    assert verdict.passed, verdict


def test_a_failing_cell_stops_the_run_and_keeps_the_notebook(runs_dir, forks, capsys):
    single = runs_dir / "single.jsonl"
    single.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert main(["run", "--name", "f", "--set", f"data.source={single}"]) == 1
    error = capsys.readouterr().err
    assert "01_prepare_data failed in cell" in error
    assert f"usable rows left of {single}: 1" in error
    assert "Traceback" not in error
    run = Run("f")
    entry = run.manifest()["01"]
    assert entry["status"] == "failed"
    assert re.search(
        r"failed in cell \d+: ValueError: usable rows left of .*single.jsonl", entry["error"]
    )
    assert "single.jsonl" in (run / "notebooks/01_prepare_data.ipynb").read_text()
    assert not (run / "notebooks/02_test_rewards.ipynb").exists()


def test_a_run_in_use_is_refused(runs_dir, capsys):
    with held("u", ".pipeline.lock"):
        assert main(["run", "--name", "u"]) == 1
    assert "run 'u' is in use by another process" in capsys.readouterr().err


def test_a_later_stage_runs_again_alone_with_what_was_set_before(again):
    before = again.manifest()
    settings = {"grpo.learning_rate": "2e-3", "grpo.max_steps": 2}
    pipeline.run_pipeline("again", settings=settings, first="03", last="03")
    after, grpo = again.manifest(), again.config().grpo
    assert after["02"] == before["02"]
    assert after["03"]["started"] != before["03"]["started"]
    assert again.settings() == TINY_SETTINGS | {"grpo.learning_rate": 2e-3, "grpo.max_steps": 2}
    assert (grpo.learning_rate, grpo.max_steps) == (2e-3, 2)
    assert grpo.per_device_train_batch_size == TINY_SETTINGS["grpo.per_device_train_batch_size"]
    assert len(list((again / "train/completions").iterdir())) == 2
    lines = (again / "train/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 2]  # two are validations


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
    assert "the rewards failed their test: nothing written: ''" in error
    assert "`ideal_length_reward_ideal_0_tolerance_1` pays 2" in error
    assert "run 02_test_rewards.ipynb again, or set force = True" in error
    assert again.state("03").why.startswith("failed: failed in cell")
    assert (again / "train/metrics.jsonl").read_bytes() == before
    report = json.loads((again / "rewards/report.json").read_text())
    assert not report["passed"]
    assert again.manifest()["02"]["status"] == "done"
    with pytest.raises(pipeline.StageFailed, match="failed their test: nothing written: ''"):
        pipeline.print_summary(again, "02")
    assert "rewards    FAILED: nothing written: ''" in capsys.readouterr().out


def test_sigterm_saves_a_checkpoint_and_the_same_command_goes_on(again):
    command = [*forked.python(), "-m", "grpo_nb", "run", "--name=again", "--only=03"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    state, tick = again / "progress.json", threading.Event()
    state.unlink()
    command += ["--set=grpo.max_steps=6", "--set=grpo.learning_rate=2e-3"]  # it begins anew
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
    lines = (again / "train/metrics.jsonl").read_text().splitlines()
    trained = [line["step"] for line in map(json.loads, lines) if "reward" in line]
    assert trained == list(range(1, 7))


def test_a_task_with_images_goes_through_the_four_notebooks(runs_dir, forks):
    short = {"grpo.max_steps": 2, "data.max_rows": 80, "data.eval_rows": 8, "train.eval_prompts": 4}
    short |= {"rewards.baseline_prompts": 12, "evaluate.samples": 1, "export.parity_prompts": 2}
    short |= {"grpo.per_device_train_batch_size": 16, "rewards.baseline_completions": 4}
    run = pipeline.run_pipeline("charts", "tiny-cpu", {"task": "charts", **short})
    assert not run.undone()
    sampled = pd.concat(map(pd.read_parquet, (run / "train/completions").glob("*.parquet")))
    assert len(sampled) == 2 * run.config().step_completions
    assert sampled["images"].str.fullmatch(r"[0-9a-f]{64}").all()
    for notebook in (run / "notebooks").glob("*.ipynb"):
        assert notebook.stat().st_size < 300_000, notebook
