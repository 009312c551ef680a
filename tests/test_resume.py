"""Trainings that are cut off: killed, stopped, out of memory, out of disk; and gone on with."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from grpo_nb import data, models, rewards, training
from grpo_nb.config import flatten, resolve
from grpo_nb.runs import Run, Stage
from grpo_nb.training import checkpoints
from grpo_nb.training.control import stop_on_signals

SETTINGS = {
    "data.max_rows": 26,  # 2 prompts a step of 9 to train on: a new order after each 4 steps
    "data.eval_rows": 16,
    "train.max_steps": 12,
    "train.per_device_train_batch_size": 8,
    "train.gradient_accumulation_steps": 2,
    "train.save_steps": 2,
    "train.eval_steps": 5,
    "train.max_completion_length": 32,
}
OF_THE_MACHINE = ("seconds", "step_time", "memory_gib", "tokens_per_second")
MATH = rewards.load_preset("math")


def make_run(name, **settings):
    """A run whose data are prepared; each test trains it."""
    config = resolve("tiny-cpu", SETTINGS, settings)
    run = Run(name)
    count = lambda chats: [30] * len(chats)  # noqa: E731
    data.prepare(run, config.data, config.seed, count, reference=MATH.reference)
    run.write_config(config)
    return run


@pytest.fixture
def session(runs_dir):
    """(settings) -> a session over a fresh policy, in one run."""

    def start(**settings):
        run = Run("here")
        if not run.path.exists():
            make_run("here")
        config = resolve("tiny-cpu", flatten(run.config()), settings)
        policy = models.load_policy(config.model, config.seed)
        rows = data.load(run, "train")
        return training.Session(Stage(run, "03", config, {}), policy, MATH, rows)

    return start


def train_in_a_process(run, *fault):
    command = [sys.executable, str(Path(__file__).with_name("interrupted.py")), run.name, *fault]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPO_NB_RUNS": str(run.path.parent)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def comparable(run):
    """The metrics without what depends on the machine's mood."""
    return [
        {k: v for k, v in line.items() if not any(word in k for word in OF_THE_MACHINE)}
        for line in training.read_lines(run / "train/metrics.jsonl")
    ]


def test_a_run_killed_three_times_ends_as_one_that_was_not(runs_dir):
    """With dynamic sampling, whose fresh prompts have to be the same ones too."""
    drawn_anew = {"train.dynamic_sampling": 2}
    whole, killed = make_run("whole", **drawn_anew), make_run("killed", **drawn_anew)
    assert train_in_a_process(whole).returncode == 0
    said = []
    for fault in (("generation", "4"), ("backward", "8"), ("saving", "10")):
        done = train_in_a_process(killed, *fault)
        assert done.returncode == -signal.SIGKILL, done.stderr
        said.append(done.stdout)
    newest = killed / "train/1-grpo/checkpoint-8"
    assert newest.is_dir() and not (killed / "train/1-grpo/checkpoint-10").exists()
    weights = newest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # and the disk lost the end of a file
    last = train_in_a_process(killed)
    assert last.returncode == 0, last.stderr
    assert "begins at step 1 of 12" in said[0]
    assert "goes on after step 2 of 12" in said[1]
    assert "goes on after step 6 of 12" in said[2]
    assert "checkpoint-8 is damaged (adapter_model.safetensors has" in last.stdout
    assert comparable(killed) == comparable(whole)
    factors = {line.get("soft_xml_format_reward/factor") for line in comparable(whole)}
    assert len(factors) > 2, "the adaptive weight never moved"
    replaced = [line["step"] for line in comparable(whole) if line.get("dynamic/replaced")]
    assert len(replaced) > 1 and max(replaced) > 6, "no group was replaced after a resumption"
    assert [line["step"] for line in comparable(whole) if "reward" in line] == list(range(1, 13))
    for name in ("adapter/adapter_model.safetensors", "1-grpo/adapter/adapter_model.safetensors"):
        assert (killed / "train" / name).read_bytes() == (whole / "train" / name).read_bytes()
    files = sorted((killed / "train/1-grpo/completions").glob("*.parquet"))
    steps = [int(pd.read_parquet(file)["step"].iloc[0]) for file in files]
    assert steps == list(range(1, 13))


def test_a_second_process_on_the_run_is_refused(runs_dir):
    run = make_run("held")
    lock = run.lock()
    try:
        done = train_in_a_process(run)
        assert done.returncode == 1
        assert "run 'held' is in use by another process" in done.stderr
    finally:
        lock.release()


def failing_at(step, error):
    def failing(completions, trainer_state=None, **_):
        if trainer_state.global_step + 1 == step:
            raise error
        return [0.0] * len(completions)

    return failing


def test_a_reward_that_raises_loses_no_step(session, runs_dir):
    broken = session()
    broken.trainer().reward_funcs[-1] = failing_at(5, KeyError("no such column"))
    with pytest.raises(KeyError, match="no such column") as caught:
        broken.run()
    assert "kept up to step 4; run this again" in caught.value.__notes__[0]
    assert checkpoints.steps_of(broken.stage.run / "train/1-grpo")[-1] == 4
    again = session()
    assert again.note == "goes on after step 4 of 12"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_first(session, number):
    stopped = session()
    trainer = stopped.trainer()
    calculate = trainer._calculate_rewards

    def ring(*args, **kwargs):
        if trainer.state.global_step + 1 == 3:
            os.kill(os.getpid(), number)
        return calculate(*args, **kwargs)

    trainer._calculate_rewards = ring
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3; run this again"):
        stopped.run()
    assert signal.getsignal(number) is before
    assert checkpoints.steps_of(stopped.stage.run / "train/1-grpo") == [2, 3]
    assert not (stopped.stage.run / "train/adapter").exists()
    assert session().note == "goes on after step 3 of 12"


def test_a_second_signal_ends_at_once(capsys):
    controls = training.Controls()
    with pytest.raises(KeyboardInterrupt), stop_on_signals(controls) as came:
        signal.raise_signal(signal.SIGINT)
        assert controls.stop.is_set() and came == [signal.SIGINT]
        signal.raise_signal(signal.SIGINT)
    assert "again to stop at once" in capsys.readouterr().out


def test_a_full_disk_keeps_the_checkpoints_before(session, monkeypatch):
    """The limit on the size of a file stands for the disk: the kernel refuses the write."""
    full = session(**{"train.keep_checkpoints": 1})
    trainer = full.trainer()
    save, limits = trainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_with_little_room(model, trial):
        room = 100_000 if trainer.state.global_step == 4 else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            save(model, trial)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    trainer._save_checkpoint = save_with_little_room
    with pytest.raises(OSError, match=r"checkpoint-4 could not be written .* GiB are free there"):
        full.run()
    folder = full.stage.run / "train/1-grpo"
    assert checkpoints.steps_of(folder) == [2]
    assert checkpoints.damage(folder / "checkpoint-2") == ""
    assert not (folder / ".saving").exists()
    assert session().note == "goes on after step 2 of 12"


def test_an_update_that_is_not_a_number_is_left_out_and_three_end_the_training(session, capsys):
    sick = session()
    trainer, seen = sick.trainer(), []
    compute = trainer.compute_loss

    def poisoned(model, inputs, *args, **kwargs):
        loss = compute(model, inputs, *args, **kwargs)
        seen.append(trainer.state.global_step)
        return loss * float("nan") if trainer.state.global_step in (1, 3, 4, 5) else loss

    trainer.compute_loss = poisoned
    with pytest.raises(RuntimeError, match="not a number in 3 steps in a row, up to step 6"):
        sick.run()
    for parameter in trainer.model.parameters():
        assert parameter.isfinite().all()
    lines = training.read_lines(sick.stage.run / "train/metrics.jsonl")
    losses = [line["loss"] for line in lines if "reward" in line]
    assert [loss is None for loss in losses] == [False, True, False, True, True, True]
    rules = {line["rule"] for line in training.read_lines(sick.stage.run / "train/health.jsonl")}
    assert "not a number" in rules
    assert checkpoints.damage(sick.stage.run / "train/1-grpo/checkpoint-6") == ""


def test_other_settings_are_not_mixed_with_a_training_that_was_cut_off(session):
    first = session()
    metrics = first.run(lambda update: first.controls.stop.set())  # the dashboard's button
    assert [line["step"] for line in metrics] == [1]
    assert (first.stage.run / "train/adapter/adapter_model.safetensors").is_file()
    with pytest.raises(ValueError, match=r"1 steps .* settings \(train.learning_rate, the stages"):
        session(**{"train.learning_rate": 5e-4})
    always = session(**{"train.learning_rate": 5e-4, "train.resume": "always"})
    assert always.note == "goes on after step 1 of 12"
    assert session(**{"train.resume": "never"}).note == "begins at step 1 of 12"


def test_a_training_that_ended_goes_on_only_if_there_is_more_to_do(session):
    session(**{"train.max_steps": 1}).run()
    with pytest.raises(ValueError, match=r"all 1 steps .* raise train.max_steps, or set resume"):
        session(**{"train.max_steps": 1, "train.resume": "always"})
    longer = session(**{"train.max_steps": 2, "train.resume": "always"})
    assert longer.note == "goes on after step 1 of 2"
    assert [line["step"] for line in longer.run()] == [1, 2]
    assert session(**{"train.max_steps": 2}).note == "begins at step 1 of 2"


def test_damage_is_named(tmp_path):
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    assert checkpoints.damage(folder) == "it has no sealed.json"
    for name in ("a.bin", "b.bin", "c.bin"):
        (folder / name).write_bytes(b"12345")
    checkpoints.seal(folder)
    assert checkpoints.damage(folder) == ""
    (folder / "c.bin").write_bytes(b"12346")
    assert checkpoints.damage(folder) == "c.bin has changed"
    (folder / "b.bin").unlink()
    assert checkpoints.damage(folder) == "b.bin is missing"
    (folder / "sealed.json").write_text("{")
    assert checkpoints.damage(folder) == "its sealed.json cannot be read"
    shutil.copytree(folder, tmp_path / "checkpoint-12")
    assert checkpoints.newest(tmp_path, say=lambda text: None) is None
    assert json.dumps(checkpoints.steps_of(tmp_path)) == "[]"
