import re
import signal
import subprocess
import sys

import pytest
import stub_trials
from conftest import held
from stub_trials import told, until, write

from grpo_nb.__main__ import main
from grpo_nb.pipeline import sweep
from grpo_nb.runs import Run, config


def test_a_grid_with_seeds_is_planned_and_nothing_starts(runs_dir, capsys):
    path = write(
        runs_dir,
        "name: rates\nprofile: tiny-cpu\nsettings: {grpo.max_steps: 9}\ngrid:\n"
        '  grpo.learning_rate: [1e-3, 3e-4]\n  rewards.reward_weights: ["1, 1, 0, 0"]\n'
        "  seed: [5, 6]\n",
    )
    trials = sweep.read_sweep(path).trials
    assert [trial.name for trial in trials] == [f"rates-00{i}" for i in range(4)]
    rates = [(t.settings["grpo.learning_rate"], t.settings["seed"]) for t in trials]
    assert rates == [(1e-3, 5), (1e-3, 6), (3e-4, 5), (3e-4, 6)]
    assert trials[0].settings["grpo.max_steps"] == 9
    assert main(["sweep", str(path), "--dry-run"]) == 0
    assert re.search(r"rates-001 .* seed = 6", capsys.readouterr().out)
    assert [path.name for path in runs_dir.iterdir()] == ["s.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {grpo.max_stepz: [1]}", "'grpo.max_stepz': did you mean 'grpo.max_steps'"),
        ("grid: {seed: []}", "something to vary: either grid"),
        ("grid: {seed: 3}", "something to vary: either grid"),
        ("list: {seed: 3}", "something to vary: either grid"),
        ("grid: {seed: [1]}\nlist: [{seed: 1}]", "something to vary: either grid"),
        ("grid: {seed: [1]}\ngird: 1", "unknown key of a sweep 'gird': did you mean 'grid'"),
        ("grid: {grpo.num_generations: [7]}", "does not divide the batch"),
        ("grid: {seed: [1]}\nname: a/b", "run_name 'a/b-000'"),
    ],
)
def test_wrong_input_starts_nothing(runs_dir, capsys, text, message):
    assert main(["sweep", str(write(runs_dir, text))]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in runs_dir.iterdir()] == ["s.yaml"]


def test_a_trial_goes_on_from_its_first_stage_that_is_not_done(runs_dir, capsys):
    trials = sweep.read_sweep(write(runs_dir, "profile: tiny-cpu\ngrid: {grpo.max_steps: [4]}"))
    run = Run("s-000")
    run.write_config(config.resolve("tiny-cpu", {"grpo.max_steps": 4}))
    for stage in ("01", "02"):
        run.record(stage, {"status": "done", "outputs": {}})
    run.record("03", {"status": "running"})  # it was killed
    assert sweep.waiting(trials) == trials.trials
    _, _, _, *words = sweep.trial_command(trials, trials.trials[0])
    assert main([*words, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "s-000, profile tiny-cpu: 03_train_grpo, 04_merge_and_infer" in said
    assert "grpo.max_steps 4 set" in said


def test_a_run_that_was_made_otherwise_is_refused_before_anything_starts(runs_dir, capsys):
    path = write(runs_dir, "profile: tiny-cpu\ngrid: {seed: [0, 1]}")
    Run("s-001").record("01", {"status": "done"})
    Run("s-001").write_config(config.resolve("tiny-cpu", {}))
    assert main(["sweep", str(path)]) == 2
    error = capsys.readouterr().err
    assert "s-001 exists and was made with other settings: give the sweep" in error
    Run("s-001").write_config(config.resolve("tiny-cpu", {"seed": 1}))
    assert main(["sweep", str(write(runs_dir, "profile: t4-16gb\ngrid: {seed: [0, 1]}"))]) == 2
    assert "give the sweep another name" in capsys.readouterr().err
    assert not Run("s-000").path.exists()


def test_trials_survive_two_kills_of_the_driver_each_run_once(runs_dir):
    """Its trials end with it. What was done then is not begun again, and nothing is lost.

    The lines that the trials write, each under its run's lock, are all that is compared: which
    processes live just after a kill can be seen too early or too late.
    """
    driver = [sys.executable, stub_trials.__file__, str(runs_dir), "20"]
    for enough in (5, 12):
        with subprocess.Popen(driver, stdout=subprocess.DEVNULL) as running:
            until(lambda count=enough: len(told(runs_dir, "ended")) >= count)
            running.kill()
        assert len(told(runs_dir, "ended")) < 20
    trials, command = stub_trials.prepare(runs_dir, 20), stub_trials.command(runs_dir)
    assert sweep.run_sweep(trials, command) == 0
    assert not sweep.waiting(trials)
    lines = told(runs_dir)
    for name in {trial.name for trial in trials.trials}:
        last = len(lines) - lines[::-1].index(f"begun {name}")
        assert f"ended {name}" not in lines[: last - 1], "begun when it was done"
    assert len(told(runs_dir, "begun")) <= 22, "only what a kill cut off is begun again"
    assert sweep.run_sweep(trials, command) == 0
    assert told(runs_dir) == lines


def test_a_failed_trial_is_told_and_the_same_command_tries_it_again(runs_dir, capsys):
    trials = stub_trials.prepare(runs_dir, 3)
    assert sweep.run_sweep(trials, stub_trials.command(runs_dir, fails=1)) == 1
    assert capsys.readouterr().out.count("stub-002: failed: grpo-nb: not yet") == 1
    assert sweep.run_sweep(trials, stub_trials.command(runs_dir, fails=1)) == 0
    names = [trial.name for trial in trials.trials]
    assert sorted(told(runs_dir, "begun")) == sorted(2 * names)
    assert told(runs_dir, "ended") == names


def test_a_run_in_use_by_someone_else_is_waited_for(runs_dir):
    driver = [sys.executable, stub_trials.__file__, str(runs_dir), "2"]
    with held("stub-001") as holder, subprocess.Popen(driver, stdout=subprocess.DEVNULL) as running:
        until(lambda: told(runs_dir, "ended") == ["stub-000"])
        holder.stdin.close()
        assert running.wait(30) == 0
    assert told(runs_dir, "begun") == ["stub-000", "stub-001"]


def test_sigterm_stops_the_trial_and_the_same_command_goes_on(runs_dir):
    command = [sys.executable, stub_trials.__file__, str(runs_dir), "2", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        until(lambda: told(runs_dir, "begun"))
        driver.terminate()
        error = driver.communicate(timeout=30)[1]
    assert driver.returncode == 128 + signal.SIGTERM
    assert "0 of 2 trials are done; the same command continues it" in error
    trials = stub_trials.prepare(runs_dir, 2)
    assert sweep.run_sweep(trials, stub_trials.command(runs_dir)) == 0
