"""Trainings that are cut off: stopped, out of memory, out of disk; and gone on with."""

import importlib
import json
import math
import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainings import comparable, lines_of, make_run, steps_that_move, stop_at, trainer_of

import grpo_nb
from grpo_nb import rewards
from grpo_nb.checks import Update
from grpo_nb.files import sha256
from grpo_nb.stages import checkpoints
from grpo_nb.stages.validation import Validation
from grpo_nb.training.interruptions import newest_checkpoint, steps_of
from grpo_nb.views import TrainingDashboard

SIX = {"grpo.max_steps": 6, "train.eval_steps": 3, "grpo.save_steps": 2}
PARTS = ("adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


def at(trainer, step, act):
    """Do something when the completions of that step are scored."""
    calculate = trainer._calculate_rewards

    def calculate_and_act(*args, **kwargs):
        if trainer.state.global_step + 1 == step:
            act()
        return calculate(*args, **kwargs)

    trainer._calculate_rewards = calculate_and_act


def digests(folder):
    return {path.name: sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The bytes of the last checkpoint of a training that nothing disturbed, and its metrics."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("straight")))
        run = make_run("here", **SIX)
        trainer_of(run).train()
        return digests(run / "train/checkpoint-6"), comparable(run)


def ends_as(straight, run):
    """Whether a run has the metrics and the last checkpoint of the one that nothing disturbed."""
    last, (weights, metrics) = digests(run / "train/checkpoint-6"), straight
    return comparable(run) == metrics and all(last[part] == weights[part] for part in PARTS[:3])


def stop_after(trainer, step):
    stop_at(trainer, step)
    with pytest.raises(KeyboardInterrupt, match=f"stopped after step {step}"):
        trainer.train()


def test_a_resume_that_fails_leaves_the_checkpoint_as_it_is(runs_dir, monkeypatch, straight):
    """Also in the same kernel, where the trainer still holds the step it was stopped at."""
    run = make_run("here", **SIX)
    one = trainer_of(run)
    stop_after(one, 4)
    fresh, before = trainer_of(run), digests(run / "train/checkpoint-4")

    def unreadable(load, name):
        def load_unless_it_is(file, *args, **kwargs):
            if Path(str(file)).name == name:
                raise OSError(5, "Input/output error", str(file))
            return load(file, *args, **kwargs)

        return load_unless_it_is

    for name in PARTS:
        with monkeypatch.context() as disk:
            disk.setattr(torch, "load", unreadable(torch.load, name))
            disk.setattr("peft.utils.save_and_load.safe_load_file", unreadable(load_file, name))
            for trainer in (fresh, one):
                with pytest.raises(OSError, match="Input/output") as caught:
                    trainer.train()
                assert digests(run / "train/checkpoint-4") == before, name
                [note] = caught.value.__notes__
                assert "kept up to step 4; run this again" in note
                assert steps_of(run / "train") == [2, 4]
    fresh.train()
    assert ends_as(straight, run)


PLACES = (
    "grpo_nb.training.guard.p_values",  # the guard's look, with noise on the weights
    "grpo_nb.environments.answer",  # a validation
    "grpo_nb.training.stock.distinct",  # a reward
    "torch.save",  # the save of a checkpoint
)


def press_twice(*_):
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def test_the_stop_button_pressed_twice_anywhere(runs_dir, straight, monkeypatch):
    """In the kernel, where the same trainer goes on each time; here from the first checkpoint."""
    run = make_run("here", **SIX)
    one = trainer_of(run, **{"train.guard_steps": 3})
    moved = steps_that_move(one)
    for place in PLACES:
        module, _, name = place.rpartition(".")
        work = getattr(importlib.import_module(module), name)

        def press_and_work(*args, work=work, **kwargs):
            if one.state.global_step >= 3:
                press_twice()
            return work(*args, **kwargs)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, press_and_work)
            one.train()
        assert moved and checkpoints.trained_steps(run / "train") == 2, place
        if place == PLACES[0]:
            noisy = len(moved)
            one.monitor.watchers[-1](Update({"step": "stopped"}, 6, [], []))
            assert len(moved) == noisy, "noise is left on the weights"
            del one.monitor.watchers[-1]
            one.remove_callback(one.guard)  # which takes its time
    one.train()
    assert ends_as(straight, run)


def test_step_1_begins_with_a_policy_that_is_not_trained_yet(runs_dir, straight):
    """Notebook 3 run twice by hand: its cells from the trainer on, or from the policy on."""
    run = make_run("here", **SIX)
    one = trainer_of(run)
    at(one, 2, press_twice)
    with pytest.raises(KeyboardInterrupt):
        one.train()
    for trainer in (trainer_of(run, one.policy), one):
        with pytest.raises(ValueError, match="load the policy and build the trainer again"):
            trainer.train()
    assert steps_of(run / "train") == []
    trainer_of(run).train()
    assert ends_as(straight, run)


def test_a_signal_saves_first_and_other_settings_begin_anew_beside_it(start):
    first = start()
    at(first, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match="after step 3; the training is kept up to step 3"):
        first.train()
    assert signal.getsignal(signal.SIGINT) is before
    assert [line["step"] for line in lines_of(first.stage.run)] == [1, 2, 3]
    anew = {"grpo.learning_rate": 5e-4, "train.eval_steps": 0, "grpo.max_steps": 1}
    with pytest.raises(ValueError, match="load the policy and build the trainer again"):
        trainer_of(first.stage.run, first.policy, **anew).train()
    other = start(**anew)
    assert other.plan == (
        "begins at step 1 of 1; what was trained here before (3 steps, with other "
        "grpo.max_steps, grpo.learning_rate, the prompts held out to validate on) is kept as "
        "train.old-1/"
    )
    assert {check.state for check in grpo_nb.preflight(other)} == {"ok"}
    assert steps_of(first.folder) == [2, 3], "it is put aside as the training begins"
    assert start().plan == "goes on after step 3 of 12"
    other.train()
    assert steps_of(first.folder) == [1]
    assert steps_of(first.folder.with_name("train.old-1")) == [2, 3]


def test_a_full_disk_keeps_the_checkpoints_before(start):
    """The limit on the size of a file stands for the disk: the kernel refuses the write."""
    trainer = start(**{"grpo.save_total_limit": 1})
    save, limits = trainer._save_checkpoint, resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_with_little_room(model, trial):
        room = 100_000 if trainer.state.global_step == 4 else limits[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            save(model, trial)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    trainer._save_checkpoint = save_with_little_room
    with pytest.raises(Exception, match=r"write|large") as caught:  # of torch or safetensors
        trainer.train()
    assert "step 4 could not be kept" in caught.value.__notes__[0]
    assert "kept up to step 2; run this again" in caught.value.__notes__[1]
    assert start().plan == "goes on after step 2 of 12"


def test_a_validation_without_scores_does_not_count(start, capsys):
    def length(completions, **_):
        return [float(len(completion[0]["content"])) for completion in completions]

    def down(completions, **_):
        return [(0.0, None, math.inf)[one.state.global_step]] * len(completions)

    one = start(rewards.reward_set([(length, 1.0)]), **{"grpo.max_steps": 2, "train.eval_steps": 1})
    without = rewards.reward_set([(down, 1.0)])
    one.validation = Validation(one.policy, one.validation_rows, without, one.stage.config)
    one.train()
    said = capsys.readouterr().out
    assert all(f"step {step}: this validation has no score" in said for step in (1, 2))
    assert (one.folder / "adapter").is_dir() and not (one.folder / "best").exists()


def test_an_out_of_memory_error_says_what_to_lower_and_keeps_the_steps(start):
    trainer = start(**{"grpo.max_steps": 3, "train.eval_steps": 0})

    def full(module, args, kwargs):
        if torch.is_grad_enabled() and trainer.state.global_step == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    hook = trainer.policy.model.register_forward_pre_hook(full, with_kwargs=True)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    hook.remove()
    kept, lower = caught.value.__notes__
    assert "kept up to step 2" in kept
    assert lower.startswith("memory ran out: lower per_device_train_batch_size and raise grad")
    smaller = {"grpo.per_device_train_batch_size": 4, "grpo.gradient_accumulation_steps": 4}
    again = start(**smaller, **{"grpo.max_steps": 3, "train.eval_steps": 0})
    assert again.plan == "goes on after step 2 of 3"


def test_stop_halts_run_all_in_a_notebook_and_the_same_trainer_goes_on(start):
    trainer = start(**{"grpo.max_steps": 3})
    trainer.monitor.dashboard = TrainingDashboard()  # as in a notebook
    stop_after(trainer, 1)
    assert (trainer.folder / "adapter/adapter_model.safetensors").is_file(), "cells below can go on"
    assert trainer.monitor.dashboard.now["phase"] == "ended after step 1"
    trainer.train()
    assert [line["step"] for line in lines_of(trainer.stage.run)] == [1, 2, 3]
    board = trainer.monitor.dashboard
    assert board.now["phase"] == "finished after step 3" and not board.error
    assert [group["step"] for group in json.loads(board.groups)] == [2, 3]
    trainer.policy.close()
    with pytest.raises(ValueError, match="this policy was closed, or has been trained"):
        trainer.train()


def test_a_signal_in_the_last_step_hands_on_and_more_is_trained_only_if_there_is_more(start):
    """Also where the hand-off itself was cut off: the last checkpoint has the weights."""
    short = {"grpo.max_steps": 1, "train.eval_steps": 0}
    last = start(**short)
    last.monitor.watchers.append(
        lambda update: update.line["step"] == 1 and os.kill(os.getpid(), signal.SIGTERM)
    )
    with pytest.raises(KeyboardInterrupt, match="stopped after step 1"):
        last.train()
    adapter = last.folder / "adapter/adapter_model.safetensors"
    before = adapter.read_bytes()
    shutil.rmtree(adapter.parent)
    again = start(**short)
    assert again.plan.startswith("all 1 steps are trained: to train them again, remove ")
    again.train()
    assert adapter.read_bytes() == before
    longer = start(**short | {"grpo.max_steps": 2})
    assert longer.plan == "goes on after step 1 of 2"
    longer.train()
    assert [line["step"] for line in lines_of(longer.stage.run)] == [1, 2]
    assert "train.old-1" in start(**short).plan


SOON = '"global_step": 4'


def test_a_checkpoint_that_is_damaged_is_removed_and_the_one_before_counts(runs_dir, capsys):
    """The newest is the one of the latest step, whatever the clock said when it was written."""
    run = make_run("here", **SIX)
    stop_after(trainer_of(run), 2)
    second, fourth = (run / f"train/checkpoint-{step}" for step in (2, 4))

    def damaged(name, change):
        shutil.copytree(second, fourth)
        state = (fourth / "trainer_state.json").read_text().replace('"global_step": 2', SOON)
        (fourth / "trainer_state.json").write_text(state)
        os.utime(second, (2e9, 2e9))
        assert newest_checkpoint(run / "train") == str(fourth)
        content = (fourth / name).read_bytes()
        (fourth / name).write_bytes(change(content, len(content) // 2))
        assert checkpoints.begin(run / "train", {}, True) == str(second) and not fourth.exists()
        assert "checkpoint-4 cannot be read: removed" in capsys.readouterr().out

    damaged("trainer_state.json", lambda content, half: content[:half])
    damaged("trainer_state.json", lambda content, half: content.replace(SOON.encode(), b'"a": 1'))
    damaged("adapter_model.safetensors", lambda content, half: content[:-1])
    damaged("optimizer.pt", lambda content, half: content[:half].ljust(2 * half, b"\0"))
    damaged("optimizer.pt", lambda content, half: content[: half - 9] + b"9" * 9 + content[half:])
    shutil.copytree(second, second.with_name("checkpoint-20-backup"))
    assert steps_of(run / "train") == [2]
