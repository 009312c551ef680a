import os
import re
import signal
import subprocess
import sys
from functools import partial

import pytest
import stub_trials
from conftest import held
from stub_trials import told, until, write

from grpo_nb.__main__ import main
from grpo_nb.pipeline import sweep
from grpo_nb.runs import Run, config


def test_a_grid_with_seeds(runs_dir):
    path = write(
        runs_dir,
        "name: rates\nprofile: tiny-cpu\nsettings: {grpo.max_steps: 9}\ngrid:\n"
        '  grpo.learning_rate: [1e-3, 3e-4]\n  rewards.reward_weights: ["1, 1, 0, 0"]\n'
        "  seed: [5, 6]\n",
    )
    asked = sweep.read_sweep(path)
    assert [trial.name for trial in asked.trials] == [f"rates-00{i}" for i in range(4)]
    rates = [(t.swept["grpo.learning_rate"], t.swept["seed"]) for t in asked.trials]
    assert rates == [(1e-3, 5), (1e-3, 6), (3e-4, 5), (3e-4, 6)]
    assert asked.trials[0].settings["grpo.max_steps"] == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grid: {grpo.max_stepz: [1]}", "'grpo.max_stepz': did you mean 'grpo.max_steps'"),
        ("grid: {}", "something to vary: either grid"),
        ("settings: 3\ngrid: {seed: [1]}", "beside settings: {setting: value"),
        ("grid: {seed: [1]}\nlist: [{seed: 1}]", "something to vary: either grid"),
        ("grid: {seed: [1]}\nsettings: {seed: 2}", "seed is varied, and set in settings"),
        ("grid: {seed: [1]}\ngird: 1", "unknown key of a sweep 'gird': did you mean 'grid'"),
        ("grid: {seed: [1", "line 1:"),
        ("grid: {grpo.num_generations: [7]}", "does not divide the batch"),
        ("grid: {seed: [1]}\nname: a/b", "run_name 'a/b-000'"),
        ("list: [null]", "list: [{setting: value, …}, …]"),
    ],
)
def test_wrong_input_starts_nothing(runs_dir, capsys, text, message):
    assert main(["sweep", str(write(runs_dir, text))]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in runs_dir.iterdir()] == ["s.yaml"]


def test_the_plan_is_shown_and_nothing_starts(runs_dir, capsys):
    assert main(["sweep", str(write(runs_dir, "grid: {seed: [7, 8]}")), "--dry-run"]) == 0
    assert re.search(r"s-001 .* seed = 8", capsys.readouterr().out)
    assert [path.name for path in runs_dir.iterdir()] == ["s.yaml"]


def test_a_run_that_was_made_otherwise_is_refused_before_anything_starts(runs_dir, capsys):
    path = write(runs_dir, "profile: tiny-cpu\ngrid: {seed: [0, 1]}")
    Run("s-001").record("01", {"status": "done"})
    Run("s-001").write_config(config.resolve("tiny-cpu", {}))
    assert main(["sweep", str(path)]) == 2
    error = capsys.readouterr().err
    assert "s-001 exists and was not made with seed = 1: give the sweep" in error
    Run("s-001").write_config(config.resolve("tiny-cpu", {"seed": 1}))
    assert main(["sweep", str(write(runs_dir, "profile: t4-16gb\ngrid: {seed: [0, 1]}"))]) == 2
    assert "give the sweep another name" in capsys.readouterr().err
    assert not Run("s-000").path.exists()


def test_100_trials_survive_two_kills_of_the_driver_each_run_once(runs_dir):
    """Its trials end with it. What was done then is not begun again, and nothing is lost.

    The lines that the trials write, each under its run's lock, are all that is compared: which
    processes live just after a kill can be seen too early or too late.
    """
    driver = [sys.executable, stub_trials.__file__, str(runs_dir), "4", "100"]
    for enough in (20, 55):
        with subprocess.Popen(driver, stdout=subprocess.DEVNULL) as running:
            until(lambda count=enough: len(told(runs_dir, "ended")) >= count)
            running.kill()
        assert len(told(runs_dir, "ended")) < 100
    asked = stub_trials.prepare(runs_dir, 100)
    run = partial(sweep.run_sweep, asked, 4, stub_trials.command(runs_dir))
    assert run() == 0
    assert not sweep.waiting(asked)
    lines, begun = told(runs_dir), told(runs_dir, "begun")
    for name in {trial.name for trial in asked.trials}:
        assert f"ended {name}" not in lines[: last(lines, f"begun {name}")], (
            "begun when it was done"
        )
    assert len(begun) <= 100 + 2 * 4, "at most those that each kill cut off are begun again"
    assert run() == 0
    assert told(runs_dir) == lines


def last(lines, line):
    return len(lines) - 1 - lines[::-1].index(line)


def test_a_failed_trial_is_told_and_the_same_command_tries_it_again(runs_dir, capsys):
    asked = stub_trials.prepare(runs_dir, 3)
    assert sweep.run_sweep(asked, 2, stub_trials.command(runs_dir, fails=1)) == 1
    assert capsys.readouterr().out.count("stub-002: failed: grpo-nb: not yet") == 1
    assert sweep.run_sweep(asked, 2, stub_trials.command(runs_dir, fails=1)) == 0
    names = [trial.name for trial in asked.trials]
    assert sorted(told(runs_dir, "begun")) == sorted(2 * names)
    assert sorted(told(runs_dir, "ended")) == names


def test_a_run_in_use_by_someone_else_waits(runs_dir):
    driver = [sys.executable, stub_trials.__file__, str(runs_dir), "2", "2"]
    with held("stub-000") as holder, subprocess.Popen(driver, stdout=subprocess.DEVNULL) as running:
        until(lambda: told(runs_dir, "ended") == ["stub-001"])
        holder.stdin.close()
        assert running.wait(30) == 0
    assert told(runs_dir, "begun") == ["stub-001", "stub-000"]


def test_sigterm_stops_the_trials_and_the_same_command_goes_on(runs_dir):
    command = [sys.executable, stub_trials.__file__, str(runs_dir), "2", "2", "600"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver:
        until(lambda: len(told(runs_dir, "begun")) == 2)
        driver.terminate()
        error = driver.communicate(timeout=30)[1]
    assert driver.returncode == 128 + signal.SIGTERM
    assert "0 of 2 trials are done; the same command continues it" in error
    asked = stub_trials.prepare(runs_dir, 2)
    assert sweep.run_sweep(asked, 2, stub_trials.command(runs_dir)) == 0


def test_each_job_gets_a_gpu_or_a_share_of_the_processors(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert sweep.shares(2) == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in ("2", "5")]
    with pytest.raises(ValueError, match="--jobs 3 with 2 GPUs: at least 1, and one trial per GPU"):
        sweep.shares(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert sweep.shares(1) == [{"OMP_NUM_THREADS": str(cores)}]
    assert sweep.shares(2 * cores) == [{"OMP_NUM_THREADS": "1"}] * 2 * cores
