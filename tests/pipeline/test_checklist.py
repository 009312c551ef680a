"""The checklist: what it says of a finished run, and of each way in which one is not finished."""

import pytest
from filelock import FileLock

from grpo_nb.__main__ import main
from grpo_nb.checks import Check
from grpo_nb.files import sha256, write_json
from grpo_nb.pipeline import checklist
from grpo_nb.runs import NOTEBOOKS, Run, config

WRITTEN = {"01": ["dataset"], "02": ["rewards"], "03": ["alerts"], "04": ["merge", "better"]}


@pytest.fixture
def run(runs_dir):
    """A finished run: a file a stage, and every check that its stages are to write."""
    run, inputs = Run("demo"), {}
    for stage, names in WRITTEN.items():
        write_json(run / f"{stage}.json", {"stage": stage})
        written = {f"{stage}.json": sha256(run / f"{stage}.json")}
        checks = [Check(name, "ok", f"{name} was seen")._asdict() for name in names]
        entry = {"status": "done", "seconds": 2.0, "inputs": dict(inputs), "outputs": written}
        run.record(stage, {**entry, "checks": checks})
        inputs |= written
    run.write_config(config.resolve("tiny-cpu", {"grpo.max_steps": 9}))
    return run


def lines_of(run):
    return {line["name"]: line for line in checklist.examine(run)}


def states(run):
    return {name: line["state"] for name, line in lines_of(run).items()}


def test_a_finished_run_is_in_order_and_says_what_a_person_has_to_read(run, capsys):
    without = states(run)
    assert without.pop("caused by the reward") == "not yet", "no placebo was trained"
    assert set(without.values()) == {"ok"}
    assert {*NOTEBOOKS.values(), "better", "unchanged"} <= without.keys()
    assert main(["checklist", "demo"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(without)} ok, 1 not yet" in printed
    assert "→ python -m grpo_nb run --name demo --placebo shuffled" in printed
    assert "reading-a-run.md#reading-completions" in printed
    assert "4 files are as their stages wrote them" in printed
    for state, code in (("warning", 0), ("stop", 1)):
        found = Check("frac_reward_zero_std", state, "98 % of the groups", "take easier rows")
        run.record("03", {"checks": [found._asdict()]})
        assert lines_of(run)["frac_reward_zero_std"] == {"stage": "03", **found._asdict()}
        assert main(["checklist", "demo"]) == code
        assert "→ take easier rows" in capsys.readouterr().out


def test_after_notebook_1_alone_its_checks_hold_and_the_rest_is_to_come(run):
    write_json(run / "manifest.json", {"01": run.manifest()["01"]})
    done = {"01_prepare_data", "dataset", "unchanged"}
    assert states(run) == dict.fromkeys(NOTEBOOKS.values(), "not yet") | dict.fromkeys(done, "ok")
    fix = "python -m grpo_nb run --name demo --from 02"
    assert lines_of(run)["02_test_rewards"]["fix"] == fix


def test_a_stage_at_work_is_waited_for_and_one_whose_process_is_gone_is_not(run):
    entry = {**run.manifest()["03"], "status": "running", "started": "at noon", "checks": []}
    write_json(run / "manifest.json", run.manifest() | {"03": entry})
    with FileLock(run / ".lock"):
        assert lines_of(run)["03_train_grpo"]["fix"] == "wait"
        assert states(run)["03_train_grpo"] == "not yet"
    run.lock()
    assert states(run)["03_train_grpo"] == "not yet", "in this process"
    assert run.in_use(".lock"), "asking took the lock away"
    run.lock().release()
    line = lines_of(run)["03_train_grpo"]
    assert line["state"] == "stop"
    assert line["evidence"] == "cut off: it began at noon, and did not end"
    assert main(["checklist", "demo"]) == 1


def test_a_file_that_changed_is_named(run):
    (run / "02.json").write_text("{}")
    line = lines_of(run)["unchanged"]
    assert line["state"] == "stop"
    assert "02.json changed after 02_test_rewards wrote it" in line["evidence"]
    (run / "02.json").unlink()
    assert "02.json was removed" in lines_of(run)["unchanged"]["evidence"]
