"""The run directory: files, lock, manifest, what a stage needs to start, config.yaml."""

import errno
import os
import re
import shutil
import signal

import pytest
import yaml
from conftest import held

from grpo_nb import files, runs
from grpo_nb.checks import Check, Checks
from grpo_nb.files import atomic_path
from grpo_nb.runs import NOTEBOOKS, Run, find_run


def start(stage, settings=None, **more):
    return runs.start(stage, "r", settings, profile="tiny-cpu", **more)


def finish(stage, text="x", settings=None, file="file"):
    """Run a stage that writes one file; returns the run."""
    started = start(stage, settings)
    path = started.run / stage / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    started.finish(f"{stage}/{file}")
    return started.run


def finish_all():
    return [finish(stage) for stage in NOTEBOOKS][-1]


def refused(said, stage, *settings, **more):
    with pytest.raises(ValueError, match=said):
        start(stage, *settings, **more)


def states(run):
    return [run.state(stage).status for stage in NOTEBOOKS]


def test_a_name_cannot_leave_the_runs_folder():
    for name in ("../x", "a/b", "", ".hidden", "a b", "x" * 101):
        with pytest.raises(ValueError, match="run_name"):
            Run(name)


def test_a_run_is_found_by_its_name_and_its_folder(runs_dir, monkeypatch):
    run = finish("01")
    monkeypatch.setenv("GRPO_NB_RUNS", ".")
    monkeypatch.chdir(runs_dir)
    assert Run("r").path == runs_dir / "r", "also for kernels, which work elsewhere"
    for given in ("r", str(run.path)):
        assert find_run(given).path == run.path
    with pytest.raises(FileNotFoundError, match=r"x is not a run: neither it nor .*/x holds a m"):
        find_run("x")


def test_a_run_of_any_folder_leaves_no_trace_in_the_environment(runs_dir, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "r"
    shutil.copytree(finish("01").path, elsewhere)
    start("01").run.lock().release()
    before = dict(os.environ)
    run = find_run(str(elsewhere))
    assert (run.name, run.path) == ("r", elsewhere) == (Run(elsewhere).name, Run(elsewhere).path)
    assert run.state("01").status == "done" and Run("r").state("01").status == "cut off"
    stage = runs.start("02", elsewhere)
    stage.run.lock().release()
    assert stage.run.path == elsewhere and dict(os.environ) == before


def test_a_write_that_fails_leaves_the_old_file_whole(tmp_path):
    target = tmp_path / "report.json"
    target.write_text("old")
    with pytest.raises(OSError, match="No space left"), atomic_path(target) as temporary:
        temporary.write_text("half of the n")
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(target, {"reward": float("nan")})
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_run_in_use_is_refused_and_freed_when_its_process_is_killed(runs_dir):
    with held("held") as holder:
        with pytest.raises(RuntimeError, match="'held' is in use by another process"):
            Run("held").lock()
        holder.send_signal(signal.SIGKILL)
    assert Run("held").lock().is_locked


def test_a_stage_needs_those_before_it(runs_dir):
    refused(r"no config.yaml: run 01_prepare_data first", "02")
    run = start("01").run
    refused("needs 01_prepare_data, which is running", "02")
    run.lock().release()
    assert run.state("01").status == "cut off"
    refused("run 'r': 02_test_rewards needs 01_prepare_data, which is cut off: it began", "02")
    finish("01")
    refused("needs 02_test_rewards, which is not started", "03")


def test_a_stage_with_a_wrong_setting_does_not_start(runs_dir):
    finish("01")
    before = finish("02").manifest()
    for settings, message in (
        ({"grpo.learning_rat": 1}, "'grpo.learning_rat': did you mean 'grpo.learning_rate'"),
        ({"data.eval_rows": 9}, "data.eval_rows belongs to 01_prepare_data: set it there"),
        ({"seed": 9}, "seed belongs to 01_prepare_data"),
    ):
        refused(message, "03", settings)
    assert Run("r").manifest() == before


def test_a_changed_or_removed_input_is_refused_unless_forced(runs_dir):
    finish("01")
    run = finish("02")
    (run / "01/file").write_text("other")
    refused(r"01/file changed after 01_prepare_data wrote it", "03")
    start("03", force=True)
    (run / "01/file").unlink()
    refused(r"01/file was removed after 01_prepare_data", "03")


def test_a_stage_that_runs_again_with_another_result_makes_the_later_ones_stale(runs_dir):
    run = finish_all()
    finish("03")
    assert states(run) == ["done"] * 4  # it wrote the same
    finish("03", "trained otherwise")
    assert states(run) == ["done", "done", "done", "stale"]
    assert run.outdated("04") == "03_train_grpo was run again after 04_merge_and_infer"
    assert run.undone() == "04"
    finish("01", "other rows")
    assert states(run) == ["done", "stale", "stale", "stale"]
    assert run.outdated("04").startswith("01_prepare_data was run again")
    again = "01_prepare_data was run again after 02_test_rewards"
    refused(f"{again}: run 02_test_rewards.ipynb first, or set force", "03")
    for stage in ("02", "03", "04"):
        finish(stage, "other")
    assert states(run) == ["done"] * 4
    assert run.outdated("04") == ""


def test_settings_reach_later_stages_and_stay_with_what_they_made(runs_dir):
    finish("01", settings={"data.eval_rows": 9, "seed": 4})
    config = start("02", {"rewards.baseline_prompts": 3}).config
    assert (config.seed, config.data.eval_rows, config.rewards.baseline_prompts) == (4, 9, 3)
    assert start("02").config.rewards.baseline_prompts == 32, "no longer set: the profile's again"
    finish("02")
    finish("03", settings={"grpo.max_completion_length": 200, "grpo.epsilon": 0.3})
    kept = finish("01").config()
    assert (kept.grpo.max_completion_length, kept.grpo.model_extra) == (200, {"epsilon": 0.3})
    assert finish("02").config().grpo.max_completion_length == 200
    fresh = start("03").config
    assert (fresh.grpo.max_completion_length, fresh.grpo.model_extra) == (48, {})
    finish("03", settings={"grpo.max_completion_length": 200})
    shorter = start("01", {"model.max_seq_length": 304}).config
    assert shorter.model.max_seq_length == 304
    assert shorter.grpo.max_completion_length == 48, "200 no longer fits"


def edit(run, settings):
    content = yaml.safe_load((run / "config.yaml").read_text())
    for name, value in settings.items():
        content["settings"][name][0] = value
    (run / "config.yaml").write_text("# mine\n" + yaml.safe_dump(content))


def test_an_edit_of_config_yaml_makes_the_stages_whose_settings_changed_stale(runs_dir):
    run = finish_all()
    edit(run, {})
    assert run.undone() == "", "a comment is no edit"
    edit(run, {"data.eval_rows": 9, "grpo.max_steps": 3})
    assert states(run) == ["stale", "done", "stale", "done"]
    reason = "config.yaml has other settings than 01_prepare_data was run with"
    assert reason in run.state("01").why
    refused(f"{reason}: run 01_prepare_data.ipynb first, or set force = True", "02")
    assert run.settings() == {"data.eval_rows": 9, "grpo.max_steps": 3}
    assert start("02", force=True).config.data.eval_rows == 9
    run.lock().release()
    edit(run, {"data.eval_rows": 256, "grpo.max_steps": 100})
    finish("02")
    assert run.undone() == ""
    text = (run / "config.yaml").read_text()
    text = re.sub(r"grpo.max_steps: .*", "grpo.max_steps: 3", text)
    (run / "config.yaml").write_text(text)
    assert run.undone() == "03"
    assert run.settings() == {"data.eval_rows": 256, "grpo.max_steps": 3}, "without a source"


def test_what_a_stage_changes_is_no_edit_and_is_kept(runs_dir):
    stage = start("01")
    stage.change({"data.eval_rows": 3})
    (stage.run / "x").touch()
    stage.finish("x")
    assert stage.run.settings() == {"data.eval_rows": 3}
    assert start("02").config.data.eval_rows == 3, "01 is done"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seed: 1\ngrpo.max_steps: {", "config.yaml cannot be read: "),
        ("settings: {seed: [1, set]}", "config.yaml: unknown profile None"),
        ("profile: tiny-cpu\nsettings: {seed: [many, set]}", "seed = 'many'"),
        ("profile: tiny-cpu\nsettings: {train.gone: 1}", "unknown setting 'train.gone'.*another"),
    ],
)
def test_a_config_yaml_that_cannot_be_read_is_one_sentence(runs_dir, text, said):
    run = finish("01")
    (run / "config.yaml").write_text(text)
    refused(said, "02")


def test_the_manifest_tells_how_a_result_came_about(runs_dir):
    run = finish("01")
    entry = finish("02").manifest()["02"]
    assert (entry["status"], entry["seed"]) == ("done", 0)
    assert not run.in_use(".lock"), "it is free for the next notebook"
    assert entry["outputs"] == {"02/file": files.sha256(run / "02/file")}
    assert entry["inputs"] == {"01/file": files.sha256(run / "01/file")}
    assert entry["versions"]["trl"] == "1.15.0"
    assert len(entry["git_commit"].removesuffix("-dirty")) in (40, len("unknown"))


def test_an_output_that_was_not_written_is_an_error(runs_dir):
    stage = start("01")
    with pytest.raises(FileNotFoundError, match="is missing: this stage should have written it"):
        stage.finish("data")
    assert stage.run.manifest()["01"]["status"] == "running"


def test_checks_are_kept_by_name_until_the_stage_begins_again(runs_dir):
    stage, bad = start("01"), Check("dataset", "stop", "no rows", "give a source")
    stage.record_checks([bad, Check("no leakage", "ok", "none")])
    stage.record_checks([Check("no leakage", "warning", "2 rows")])
    recorded = Checks(Check(**check) for check in stage.run.manifest()["01"]["checks"])
    assert recorded == [bad, Check("no leakage", "warning", "2 rows")]
    assert list(recorded.table()["state"]) == ["stop", "warning"]
    with pytest.raises(ValueError, match=r"^dataset: no rows\. give a source \(to continue anyway"):
        recorded.refuse()
    recorded.refuse(force=True)
    assert start("01").run.manifest()["01"]["checks"] == []
