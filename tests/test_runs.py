import errno
import json
import signal
import subprocess
import sys

import pytest

from grpo_nb import runs
from grpo_nb.runs import Run, atomic_path, start_stage

HOLD_LOCK = """
import sys
from grpo_nb.runs import Run
Run("held").lock()
print("locked", flush=True)
sys.stdin.read()
"""
PARAMETERS = {"run_name": "r", "profile": "tiny-cpu"}


def finish(stage_name, relative, text="x"):
    stage = start_stage(stage_name, PARAMETERS)
    (stage.run / relative).parent.mkdir(parents=True, exist_ok=True)
    (stage.run / relative).write_text(text)
    return stage, stage.finish(relative)


def test_a_name_cannot_leave_the_runs_folder():
    for name in ("../x", "a/b", "", ".hidden", "a b", "x" * 101):
        with pytest.raises(ValueError, match="run_name"):
            Run(name)


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path):
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(OSError, match="No space left"), atomic_path(target) as temporary:
        temporary.write_text("half of the n")
        raise OSError(errno.ENOSPC, "No space left on device")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_is_replaced_whole(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "stale").touch()
    with atomic_path(target) as temporary:
        temporary.mkdir()
        (temporary / "fresh").touch()
    assert [path.name for path in target.iterdir()] == ["fresh"]


def test_a_nan_never_reaches_a_json_file(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        runs.write_json(tmp_path / "x.json", {"reward": float("nan")})
    assert not list(tmp_path.iterdir())


def test_a_run_in_use_is_refused_and_freed_when_its_process_is_killed(runs_dir):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RuntimeError, match="'held' is in use by another process"):
            Run("held").lock()
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert Run("held").lock().is_locked


def test_a_stage_before_the_one_it_needs_is_refused(runs_dir):
    with pytest.raises(ValueError, match=r"no config.yaml: run 01_prepare_data first"):
        start_stage("02", PARAMETERS)
    finish("01", "data/train.parquet")
    with pytest.raises(ValueError, match=r"needs 02_test_rewards, which is not started"):
        start_stage("03", PARAMETERS)


def test_a_stage_that_was_interrupted_does_not_count_as_done(runs_dir):
    start_stage("01", PARAMETERS)
    with pytest.raises(ValueError, match="01_prepare_data, which is running"):
        start_stage("02", PARAMETERS)


def test_a_changed_or_removed_input_is_refused_unless_forced(runs_dir):
    stage, _ = finish("01", "data/train.parquet")
    finish("02", "rewards/report.json")
    (stage.run / "data/train.parquet").write_text("other")
    with pytest.raises(ValueError, match=r"data/train.parquet changed after 01_prepare_data"):
        start_stage("03", PARAMETERS)
    start_stage("03", PARAMETERS | {"force": True})
    (stage.run / "data/train.parquet").unlink()
    with pytest.raises(ValueError, match=r"data/train.parquet was removed"):
        start_stage("03", PARAMETERS)


def test_running_01_again_with_other_data_asks_for_02_again(runs_dir):
    finish("01", "data/train.parquet")
    finish("02", "rewards/report.json")
    finish("01", "data/train.parquet", text="other")
    with pytest.raises(ValueError, match=r"changed after 02_test_rewards read it"):
        start_stage("03", PARAMETERS)
    finish("02", "rewards/report.json")
    start_stage("03", PARAMETERS)


def test_running_01_again_with_the_same_data_changes_nothing(runs_dir):
    finish("01", "data/train.parquet")
    finish("02", "rewards/report.json")
    finish("01", "data/train.parquet")
    start_stage("03", PARAMETERS)


def test_settings_reach_later_stages_through_config_yaml(runs_dir):
    stage = start_stage("01", PARAMETERS | {"eval_rows": 9, "seed": 4})
    (stage.run / "x").touch()
    stage.finish("x")
    config = start_stage("02", PARAMETERS | {"pilot_prompts": 3}).config
    assert (config.seed, config.data.eval_rows, config.rewards.pilot_prompts) == (4, 9, 3)


def test_what_is_no_longer_set_is_the_profiles_again(runs_dir):
    finish("01", "x")
    assert start_stage("02", PARAMETERS | {"pilot_prompts": 3}).config.rewards.pilot_prompts == 3
    assert start_stage("02", PARAMETERS | {"pilot_prompts": -1}).config.rewards.pilot_prompts == 32


def test_the_manifest_tells_how_a_result_came_about(runs_dir):
    stage, message = finish("01", "data/train.parquet")
    entry = stage.run.manifest()["01"]
    assert entry["status"] == "done"
    assert entry["outputs"] == {"data/train.parquet": runs.sha256(stage.run / "data/train.parquet")}
    assert entry["versions"]["trl"] == "1.15.0"
    assert len(entry["git_commit"].removesuffix("-dirty")) in (40, len("unknown"))
    assert message.endswith("next: 02_test_rewards.ipynb")


def test_finishing_frees_the_run_for_the_next_notebook(runs_dir):
    finish("01", "x")
    probe = "from grpo_nb.runs import Run; Run('r').lock(); print('free')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout == "free\n", done.stderr


def test_an_output_that_was_not_written_is_an_error(runs_dir):
    stage = start_stage("01", PARAMETERS)
    with pytest.raises(FileNotFoundError, match="was to be written by this stage"):
        stage.finish("data")
    assert stage.run.manifest()["01"]["status"] == "running"


def test_no_half_written_manifest_survives_a_kill(runs_dir):
    script = """
import os
from grpo_nb import runs
run = runs.Run("k")
run.record("01", {"status": "done"})
replace = runs.Path.replace
runs.Path.replace = lambda *_: os.kill(os.getpid(), 9)
run.record("01", {"status": "failed"})
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL
    assert json.loads((runs_dir / "k/manifest.json").read_text()) == {"01": {"status": "done"}}
