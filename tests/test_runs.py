import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import yaml

from grpo_nb import runs
from grpo_nb.pipeline.notebooks import undone
from grpo_nb.runs import Run, atomic_path, start_stage

HOLD_LOCK = """
import sys
from grpo_nb.runs import Run
Run("held").lock()
print("locked", flush=True)
sys.stdin.read()
"""
OUTPUTS = {
    **{"01": "data/train.parquet", "02": "rewards/report.json"},
    **{"03": "train/adapter/weights", "04": "model/merged/weights"},
}


def start(stage, settings=None, **more):
    return start_stage(stage, "r", settings, profile="tiny-cpu", **more)


def finish(stage_name, relative, text="x"):
    stage = start(stage_name)
    (stage.run / relative).parent.mkdir(parents=True, exist_ok=True)
    (stage.run / relative).write_text(text)
    return stage, stage.finish(relative)


def test_a_name_cannot_leave_the_runs_folder():
    for name in ("../x", "a/b", "", ".hidden", "a b", "x" * 101):
        with pytest.raises(ValueError, match="run_name"):
            Run(name)


def test_a_relative_place_for_runs_is_resolved_once_for_all_that_work_elsewhere(
    tmp_path, monkeypatch
):
    (tmp_path / "notebooks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRPO_NB_RUNS", "mine/runs")
    where = Run("r").path
    assert where == tmp_path / "mine/runs/r"
    monkeypatch.chdir("notebooks")
    assert Run("r").path == where
    probe = "from grpo_nb.runs import Run; print(Run('r').path)"
    path = {"PYTHONPATH": str(runs.PROJECT_ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, env=os.environ | path
    )
    assert done.stdout.strip() == str(where), done.stderr


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
        start("02")
    finish("01", "data/train.parquet")
    with pytest.raises(ValueError, match=r"needs 02_test_rewards, which is not started"):
        start("03")


def test_a_stage_that_was_interrupted_does_not_count_as_done(runs_dir):
    start("01")
    with pytest.raises(ValueError, match="01_prepare_data, which is running"):
        start("02")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train.learning_rat": 1}, "'train.learning_rat': did you mean 'train.learning_rate'"),
        ({"train.max_steps": "many"}, "train.max_steps = 'many': input should be a valid integer"),
        ({"train.beta": float("nan")}, "train.beta = nan"),
        ({"trl": {"epsilon": 0.1}}, "unknown setting 'trl'"),
        ({"data.eval_rows": 9}, "data.eval_rows belongs to 01_prepare_data, not to 03_train_grpo"),
        ({"seed": 9}, "seed belongs to 01_prepare_data"),
    ],
)
def test_a_stage_with_a_wrong_setting_does_not_start(runs_dir, settings, message):
    finish("01", "data/train.parquet")
    stage, _ = finish("02", "rewards/report.json")
    before = stage.run.manifest()
    with pytest.raises(ValueError, match=message):
        start("03", settings)
    assert stage.run.manifest() == before


def test_a_changed_or_removed_input_is_refused_unless_forced(runs_dir):
    stage, _ = finish("01", "data/train.parquet")
    finish("02", "rewards/report.json")
    (stage.run / "data/train.parquet").write_text("other")
    with pytest.raises(ValueError, match=r"data/train.parquet changed after 01_prepare_data"):
        start("03")
    start("03", force=True)
    (stage.run / "data/train.parquet").unlink()
    with pytest.raises(ValueError, match=r"data/train.parquet was removed"):
        start("03")


def test_running_01_again_with_other_data_asks_for_02_again(runs_dir):
    finish("01", "data/train.parquet")
    finish("02", "rewards/report.json")
    finish("01", "data/train.parquet", text="other")
    with pytest.raises(ValueError, match=r"01_prepare_data was run again .*\(--from 02\)"):
        start("03")
    finish("02", "rewards/report.json")
    start("03")


def test_running_01_again_with_the_same_data_changes_nothing(runs_dir):
    finish("01", "data/train.parquet")
    finish("02", "rewards/report.json")
    finish("01", "data/train.parquet")
    start("03")


def finish_all():
    for stage, written in OUTPUTS.items():
        run = finish(stage, written)[0].run
    return run


def test_a_stage_that_runs_again_with_another_result_makes_the_later_ones_stale(runs_dir):
    run = finish_all()
    finish("03", OUTPUTS["03"])
    assert [run.status(stage) for stage in OUTPUTS] == ["done"] * 4  # it wrote the same
    finish("03", OUTPUTS["03"], text="trained otherwise")
    assert [run.status(stage) for stage in OUTPUTS] == ["done", "done", "done", "stale"]
    said = "03_train_grpo was run again after 04_merge_and_infer: run 04_merge_and_infer"
    assert run.why_stale() == f"{said} (--from 04)"
    assert undone(run) == ["04"]
    finish("01", OUTPUTS["01"], text="other rows")
    assert [run.status(stage) for stage in OUTPUTS] == ["done", "stale", "stale", "stale"]
    with pytest.raises(ValueError, match=r"run 'r': 01_prepare_data was run again .*--from 02"):
        run.refuse_stale()
    for stage in ("02", "03", "04"):
        finish(stage, OUTPUTS[stage], text="anew")
    assert [run.status(stage) for stage in OUTPUTS] == ["done"] * 4
    run.refuse_stale()


def test_what_stage_04_wrote_is_stale_while_the_training_before_it_is_cut_off(runs_dir):
    run = finish_all()
    start("03")
    run.lock().release()
    assert (run.status("03"), run.status("04")) == ("cut off", "stale")
    with pytest.raises(ValueError, match=r"03_train_grpo was run again .*\(--from 03\)"):
        run.refuse_stale()


def test_what_stage_04_wrote_stays_stale_until_it_has_ended_anew(runs_dir):
    run = finish_all()
    finish("03", OUTPUTS["03"], text="trained otherwise")
    for _ in range(2):
        start("04")
        run.lock().release()
        with pytest.raises(ValueError, match="03_train_grpo was run again after 04_merge"):
            run.refuse_stale()
    finish("04", OUTPUTS["04"], text="anew")
    run.refuse_stale()


def test_a_stage_before_that_no_longer_writes_a_file_is_noticed(runs_dir):
    finish_all()
    finish("01", "data/other.parquet")
    (Run("r") / OUTPUTS["02"]).write_text("x")
    with pytest.raises(ValueError, match="01_prepare_data was run again after 02_test_rewards"):
        start("03")
    start("03", force=True)


def test_settings_reach_later_stages_through_config_yaml(runs_dir):
    stage = start("01", {"data.eval_rows": 9, "seed": 4})
    (stage.run / "x").touch()
    stage.finish("x")
    config = start("02", {"rewards.pilot_prompts": 3}).config
    assert (config.seed, config.data.eval_rows, config.rewards.pilot_prompts) == (4, 9, 3)


def edit(run, **settings):
    content = yaml.safe_load((run / "config.yaml").read_text())
    content.update({name.replace("__", "."): value for name, value in settings.items()})
    (run / "config.yaml").write_text(yaml.safe_dump(content))


def test_an_edit_of_config_yaml_is_noticed_and_named(runs_dir):
    stage, _ = finish("01", "x")
    edit(stage.run, data__eval_rows=9, train__max_steps=3)
    for later in ("01", "02"):
        with pytest.raises(ValueError, match=r"config.yaml was edited") as error:
            start(later)
        assert "data.eval_rows: 256 → 9; train.max_steps: 100 → 3" in str(error.value)
    edit(stage.run, data__eval_rows=256, train__max_steps=100)
    start("02")
    stage.run.lock().release()
    edit(stage.run, data__eval_rows=9)  # stage 02 is cut off
    with pytest.raises(ValueError, match=r"was edited \(data.eval_rows: 256 → 9\): the stages"):
        start("02")
    assert start("02", force=True).config.data.eval_rows == 9


def test_a_comment_in_config_yaml_and_what_the_stages_set_is_no_edit(runs_dir):
    stage = start("01")
    stage.change({"rewards.pilot_prompts": 3})
    (stage.run / "x").touch()
    stage.finish("x")
    path = stage.run / "config.yaml"
    path.write_text("# mine\n" + path.read_text())
    assert start("02").config.rewards.pilot_prompts == 32


def test_a_broken_config_yaml_names_file_and_line(runs_dir):
    run = finish("01", "x")[0].run
    for text, said in (
        ("seed: 1\ntrain.max_steps: {", "config.yaml, line "),
        ("seed: 1", "config.yaml names no profile: restore it"),
        ("- 1", "config.yaml: write one `setting: value` a line"),
        ("profile: tiny-cpu\ntrain.max_stps: 1", "did you mean 'train.max_steps'"),
        ("profile: tiny-cpu\nseed: many", "seed = 'many'"),
        ("", "config.yaml: write one"),
    ):
        (run / "config.yaml").write_text(text)
        with pytest.raises(ValueError, match=said):
            start("02")


@pytest.mark.parametrize("name", ["manifest.json", "settings.json"])
@pytest.mark.parametrize("content", ["{", "[]", "", "\x00", "[" * 9999])
def test_a_damaged_file_of_the_run_is_named(runs_dir, name, content):
    run = finish("01", "x")[0].run
    (run / name).write_text(content)
    with pytest.raises(ValueError, match=f"{name} is damaged, restore it"):
        run.manifest(), run.settings()


def test_running_01_again_keeps_the_settings_of_the_training_that_is_there(runs_dir):
    finish("01", "x")
    finish("02", "y")
    stage = start("03", {"train.max_steps": 7, "trl.epsilon": 0.3})
    (stage.run / "z").touch()
    stage.finish("z")
    again, _ = finish("01", "x")
    kept = again.run.config()
    assert (kept.train.max_steps, kept.trl) == (7, {"epsilon": 0.3})
    fresh = start("03").config
    assert (fresh.train.max_steps, fresh.trl) == (100, {})


def test_what_is_no_longer_set_is_the_profiles_again(runs_dir):
    finish("01", "x")
    assert start("02", {"rewards.pilot_prompts": 3}).config.rewards.pilot_prompts == 3
    assert start("02").config.rewards.pilot_prompts == 32


def test_later_settings_that_no_longer_fit_are_left(runs_dir):
    finish("01", "x")
    finish("02", "y")
    stage = start("03", {"train.max_completion_length": 200})
    (stage.run / "z").touch()
    stage.finish("z")
    config = start("01", {"model.max_seq_length": 304}).config
    assert (config.model.max_seq_length, config.train.max_completion_length) == (304, 48)


def test_the_manifest_tells_how_a_result_came_about(runs_dir):
    stage, message = finish("01", "data/train.parquet")
    entry = stage.run.manifest()["01"]
    assert entry["status"] == "done"
    assert entry["outputs"] == {"data/train.parquet": runs.sha256(stage.run / "data/train.parquet")}
    assert entry["versions"]["trl"] == "1.15.0"
    assert len(entry["git_commit"].removesuffix("-dirty")) in (40, len("unknown"))
    assert message.endswith("next: 02_test_rewards.ipynb")


def test_the_manifest_holds_the_switches_of_unsloth_and_vllm_and_no_secret(runs_dir, monkeypatch):
    for name in [n for n in os.environ if n.startswith(("UNSLOTH_", "VLLM_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UNSLOTH_GRPO_SEQ_PACKING", "0")
    for name in ("VLLM_API_KEY", "UNSLOTH_HF_TOKEN", "VLLM_CLIENT_SECRET", "VLLM_PASSWORD"):
        monkeypatch.setenv(name, "hunter2")
    stage, _ = finish("01", "x")
    assert stage.run.manifest()["01"]["switches"] == {
        "UNSLOTH_GRPO_SEQ_PACKING": "0",
        **{"UNSLOTH_HF_TOKEN": "(secret)", "VLLM_API_KEY": "(secret)"},
        **{"VLLM_CLIENT_SECRET": "(secret)", "VLLM_PASSWORD": "(secret)"},
    }
    assert "hunter2" not in (stage.run / "manifest.json").read_text()


def test_finishing_frees_the_run_for_the_next_notebook(runs_dir):
    finish("01", "x")
    probe = "from grpo_nb.runs import Run; Run('r').lock(); print('free')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout == "free\n", done.stderr


def test_an_output_that_was_not_written_is_an_error(runs_dir):
    stage = start("01")
    with pytest.raises(FileNotFoundError, match="was to be written by this stage"):
        stage.finish("data")
    assert stage.run.manifest()["01"]["status"] == "running"


def test_no_half_written_manifest_survives_a_kill(runs_dir):
    script = """
import os
from grpo_nb import runs
run = runs.Run("k")
run.record("01", {"status": "done"})
from pathlib import Path
Path.replace = lambda *_: os.kill(os.getpid(), 9)
run.record("01", {"status": "failed"})
"""
    done = subprocess.run([sys.executable, "-c", script])
    assert done.returncode == -signal.SIGKILL
    assert json.loads((runs_dir / "k/manifest.json").read_text()) == {"01": {"status": "done"}}
