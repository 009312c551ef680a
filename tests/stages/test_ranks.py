"""Trainings in processes of their own: killed, and shared by two, of which one may end."""

import json
import os
import shutil
import signal
import subprocess
import time

import forked
import pandas as pd
import pytest
from safetensors.torch import load_file
from trainings import comparable, lines_of, make_run

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.runs import Run, refuse_undone
from grpo_nb.training.interruptions import is_whole

pytestmark = pytest.mark.usefixtures("forks")
TWO = {
    "policy.backend": "transformers",
    "policy.rollouts": "model",  # two processes have no other
    "grpo.max_steps": 4,
    "grpo.save_steps": 2,
    "train.eval_steps": 0,
}
OURS = PROJECT_ROOT / "tests/rank.py"


def launch(run, *arguments, processes=2, code=0):
    """Processes of tests/rank.py, which end with a code; 0 processes: one without a launcher."""
    started = launcher(processes) if processes else []
    done = python(*started, str(OURS), run.name, *arguments, root=run.path.parent)
    assert done.returncode == code, done.stderr
    return done


def launcher(processes):
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def python(*arguments, root):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GRPO_NB_RUNS": str(root)}
    environment[forked.CHILDREN] = "1"
    command = [*forked.python(), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, timeout=300
    )


def completions(run):
    files = sorted((run / "train/completions").glob("*.parquet"))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, forks):
    """A run that two processes trained without a fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("ranks")))
        run = make_run("whole", **TWO | {"train.guard_steps": 2})
    launch(run)
    return run


ADAPTIVE = """from grpo_nb import rewards
math = rewards.PRESETS["math"]
adaptive = rewards.Adaptive(rewards.soft_format_reward, low=0.75, change=1.5)
reward_funcs = [math.reward_funcs[0], *math.reward_funcs[2:], adaptive]
reward_weights = [1, *math.reward_weights[2:], 0.25]
"""


def mixed_rewards(folder):
    """A weight that adapts, a placebo, and rows drawn by their difficulty."""
    (folder / "adaptive.py").write_text(ADAPTIVE)
    return {
        "rewards.preset": str(folder / "adaptive.py"),
        "train.placebo": "shuffled",
        "train.difficulty": True,
    }


def test_a_run_killed_three_times_ends_as_one_that_was_not(runs_dir):
    settings = {"policy.backend": "transformers", "grpo.max_steps": 8} | mixed_rewards(runs_dir)
    whole, killed = make_run("whole", **settings), make_run("killed", **settings)
    launch(whole, processes=0)
    told = ("begins at step 1 of 8", "goes on after step 2 of 8", "goes on after step 4 of 8")
    faults = (("generation", "3"), ("backward", "5"), ("saving", "6"))
    for (phase, step), said in zip(faults, told, strict=True):
        done = launch(killed, phase, "0", step, processes=0, code=-signal.SIGKILL)
        assert said in done.stdout
    newest, torn = killed / "train/checkpoint-4", killed / "train/checkpoint-6"
    assert newest.is_dir() and not is_whole(torn)
    weights = newest / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # and the disk lost the end of a file
    assert "checkpoint-4 cannot be read: removed" in launch(killed, processes=0).stdout
    assert comparable(killed) == comparable(whole)
    factors = {line.get("soft_format_reward/factor") for line in comparable(whole)}
    assert len(factors) > 2, "the adaptive weight never moved"
    assert [line["step"] for line in lines_of(whole)] == list(range(1, 9))
    for name in ("adapter/adapter_model.safetensors", "checkpoint-8/adapter_model.safetensors"):
        assert (killed / "train" / name).read_bytes() == (whole / "train" / name).read_bytes()
    assert completions(killed)["step"].drop_duplicates().tolist() == list(range(1, 9))


def test_two_processes_train_as_one_and_go_on_with_each_other_s_work(runs_dir):
    """The same completions are planted: sampling differs, each process has random numbers.

    A weight adapts to the scores of all, but not in a validation, which is the first one's alone.
    """
    settings = TWO | {"model.load_in_4bit": False, "grpo.bf16": False, "train.eval_steps": 2}
    settings |= mixed_rewards(runs_dir)
    one, mixed = (make_run(name, **settings) for name in ("one", "mixed"))
    first = launch(one, "planted", processes=1)
    assert any(line.get("grad_norm", 0) > 0.1 for line in comparable(one))
    for processes, stopped in ((2, 1), (1, 3)):  # SIGTERM to the last process alone
        stop = "planted stop", str(processes - 1), str(stopped)
        done = launch(mixed, *stop, processes=processes, code=1)
        said = f"KeyboardInterrupt: stopped after step {stopped}; the training is kept up to step"
        assert done.stderr.count(said) == 1, done.stderr
    last = launch(mixed, "planted")
    assert "goes on after step 3 of 4" in last.stdout
    for processes, done in ((1, first), (2, last)):
        assert f"2 prompts x 8 = 16 completions, on {processes} process(es)" in done.stdout
        assert done.stdout.count("step 4/4: reward") == 1, "every process spoke"
    runs = one, mixed
    lines = [comparable(run) for run in runs]
    assert list(map(len, lines)) == [7, 7]  # 4 steps and 3 validations
    for alone, shared in zip(*lines, strict=True):
        # TRL takes the mean over micro-batches, which hold other rows, whatever their lengths.
        assert shared.pop("entropy", 0) == pytest.approx(alone.pop("entropy", 0), rel=0.1)
        assert shared == pytest.approx(alone, rel=1e-4, abs=1e-6)
    columns = ["step", "prompt", "completion", "advantage"]
    pd.testing.assert_frame_equal(*(completions(run)[columns].astype(str) for run in runs))
    file = "train/checkpoint-4/adapter_model.safetensors"
    alone, shared = (load_file(run / file) for run in runs)
    for name, weights in alone.items():
        assert (weights - shared[name]).abs().max() < 1e-4, name


def test_killed_and_failed_on_one_process_it_ends_as_if_nothing_had_been(two_processes, runs_dir):
    run = make_run("cut", **TWO)
    started = time.monotonic()
    killed = launch(run, "kill", "1", "4", code=1)
    assert time.monotonic() - started < 120
    said = "another process of this run died; see its error; the training is kept up to step 2; run"
    own, _, report = killed.stderr.partition("Failures:")
    assert own.count(f"RuntimeError: {said}") == report.count(f"RuntimeError: {said}") == 1, own
    cause = report.partition("Root Cause")[2]
    assert "rank      : 1 " in cause and f"Signal {signal.SIGKILL.value}" in cause, killed.stderr
    failed = launch(run, "raise", "1", "4", code=1)
    assert "goes on after step 2 of 4" in failed.stdout
    own, _, report = failed.stderr.partition("Failures:")
    cause = report.partition("Root Cause")[2]
    assert "rank      : 1 " in cause and "exitcode  : 1 " in cause, failed.stderr
    assert cause.count("KeyError: 'no such column'") == 1, failed.stderr
    assert own.count("RuntimeError: another process of this run died; see its error;") == 1, own
    launch(run)
    assert [line["step"] for line in comparable(run)] == [1, 2, 3, 4]
    assert comparable(run) == comparable(two_processes)
    for name in ("train/adapter", "train/checkpoint-4"):
        weights = f"{name}/adapter_model.safetensors"
        assert (run / weights).read_bytes() == (two_processes / weights).read_bytes()
    assert run.manifest()["03"]["status"] == "done"


def test_unsloth_on_several_processes_is_refused_once(runs_dir):
    run = make_run("unsloth")
    run.record("02", {"status": "done", "outputs": {}})
    command = ["-m", "grpo_nb", "train", run.name, "--force"]
    done = python(*launcher(2), *command, root=runs_dir)
    said = "grpo-nb: Unsloth trains in one process, and there are 2: start one, or use --set policy"
    assert done.returncode == 1 and done.stderr.count(said) == 1, done.stderr
    cause = done.stderr.partition("Root Cause")[2]
    assert f"ValueError: {said.removeprefix('grpo-nb: ')}" in cause, done.stderr


def test_without_a_launcher_one_process_trains_and_hands_on(demo_run, runs_dir):
    run = Run("alone")
    shutil.copytree(demo_run.path, run.path)
    command = ["-m", "grpo_nb", "train", str(run.path)]
    done = python(*command, "--processes", "2", root=runs_dir)
    assert done.returncode == 2
    assert "grpo-nb: expected 2 processes, but 1 were started: start them with" in done.stderr
    short = ["--set", "grpo.max_steps=2", "--set", "policy.backend=transformers"]
    done = python(*command, *short, root=runs_dir)
    assert done.returncode == 0, done.stderr
    assert "on 1 process(es)" in done.stdout
    assert done.stdout.splitlines()[-1].endswith("next: 04_merge_and_infer.ipynb")
    refuse_undone(run, "04")
    assert run.config().policy.backend == "transformers"


def test_sharded_weights_generate_and_are_saved_whole(tmp_path):
    """FSDP2 by torch itself; under accelerate and NCCL it was not run."""
    done = python(*launcher(2), str(OURS.with_name("sharded.py")), str(tmp_path), root=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["whole"] == report["before the first step"] == report["after it"]
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert len(adapter) == 56 and report["gradients"] == 28, "LoRA's A has none at the start"
    assert all(weights.dim() == 2 and weights.numel() for weights in adapter.values())
