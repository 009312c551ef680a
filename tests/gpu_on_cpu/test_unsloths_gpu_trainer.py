"""Unsloth's GPU trainer, which a CPU never meets otherwise, from load to adapter on the tiny base.

What it shows: which methods are called with what, modes, padding, checkpointing, gradients, logged
keys. What it cannot: kernels, memory, speed, vLLM.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_nb.machine import PROJECT_ROOT


def report_of(script, folder, *packages):
    """What a script's scenarios report; one that raised fails the test that asks for it."""
    command = [sys.executable, Path(__file__).with_name(script), folder]
    path = os.pathsep.join(map(str, [PROJECT_ROOT, *packages]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((folder / "report.json").read_text(encoding="utf-8"))

    def of(scenario):
        assert "error" not in found[scenario], found[scenario]["error"]
        return found[scenario]

    return of


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    for package in ("triton", "diffusers"):  # Unsloth imports them on a GPU
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -r requirements-test.txt")
    return report_of("scenarios.py", tmp_path_factory.mktemp("gpu_on_cpu"))


def test_what_unsloth_changes_of_the_arguments_is_named(report):
    found = report("arguments")
    papers = {"epsilon_high", "mask_truncated_completions", "scale_rewards", "beta"}
    kept = {n: {k: v for k, v in was.items() if v and k in papers} for n, was in found.items()}
    assert kept == {key: {} for key in found} | {
        "dapo": {
            "epsilon_high": "changed from None to 0.28",
            "mask_truncated_completions": "changed from False to True",
        },
        "cispo": {"epsilon_high": "changed from None to 5.0"},
        "dr_grpo": {"scale_rewards": "changed from group to none"},
        "dr_grpo set": {"scale_rewards": "changed from group to none"},
    }
    for was in found.values():
        assert was["vllm_importance_sampling_correction"] == "changed from True to False"
        assert was["weight_decay"] == "changed from 0.0 to 0.001"


def test_arguments_that_unsloths_trainer_wrote_to_serve_a_second_one(report):
    assert report("changed_arguments")["plan"].startswith("begins at step 1 of 4")


def test_it_is_unsloths_trainer_that_trains(report):
    """Without entropy in its log; how different samples are says as much."""
    seen = report("a_training")
    assert "UnslothGRPOTrainer" in seen["trainer"]
    assert [line["step"] for line in seen["steps"]] == [1, 2, 3, 4]
    assert any(line["grad_norm"] > 0 for line in seen["steps"])
    last = seen["steps"][-1]
    assert "entropy" not in last and last["groups/distinct"] > 0


def test_validation_is_the_same_before_and_after_the_trainer_is_built(report):
    seen = report("a_training")
    assert seen["answers before the trainer"] == seen["answers after it"]
    assert seen["validated"] and min(seen["validated"]) > 0


def test_the_preflights_step_is_checkpointed_as_the_trainings(report):
    seen = report("a_training")
    assert set(seen["checks"].values()) == {"ok"}
    for flags in seen["checkpointed"].values():
        assert flags and all(flags)


def test_a_training_that_was_cut_off_ends_as_one_that_was_not(report):
    seen = report("cut_off")
    assert seen["note"] == "goes on after step 2 of 4"
    whole, cut = seen["metrics"]
    assert whole == cut
    assert seen["adapters"] == 1, "they differ"


def test_the_supervised_warm_up_learns_and_grpo_goes_on_from_it(report):
    seen = report("warm_up")
    assert seen["lines"][-1]["loss"] < seen["lines"][0]["loss"]
    assert seen["moved"]


def test_a_step_without_scores_is_left_out(report):
    seen = report("a_reward_that_is_down")
    assert [line["step"] for line in seen["steps"]] == [1, 2, 3, 4]
    assert seen["moved"] == [1, 4]


def test_overflows_of_fp16_are_waited_for(report):
    """More than three steps in a row, which would end a training that diverges."""
    seen = report("overflow")
    assert seen["checks"]["gradient"] == "ok"
    assert seen["scale after the preflight"] == 2.0**28
    assert seen["moved"][0] > 4
    assert seen["scale"] == 2.0 ** (28 - 8 + len(seen["moved"]))


def test_it_trains_on_episodes_and_masks_what_tools_say(report):
    seen = report("an_environment")
    assert "stop" not in seen["checks"].values()
    assert [line["step"] for line in seen["steps"]] == [1, 2, 3, 4]
    assert any(line["grad_norm"] > 0 for line in seen["steps"])
    assert any(line["tools/call_frequency"] > 0 for line in seen["steps"])
    for share, line in zip(seen["masks"], seen["steps"], strict=True):
        assert (share < 1) == (line["tools/call_frequency"] > 0)  # the tools' tokens, and no others


def test_the_tools_work_beside_a_notebooks_own_trainer(report):
    """Prompts of several lengths: Unsloth moves each row by the padding before it."""
    seen = report("a_stock_trainer")
    assert "UnslothGRPOTrainer" in seen["trainer"] and "Trainer" in seen["trainer"]
    assert set(seen["checks"].values()) == {"ok"} and not seen["failure"]
    assert [line["step"] for line in seen["steps"]] == [1, 2, 3]
    assert len(seen["looks"]) == 3 and seen["looks"][0]["change"] > 1
    assert all(abs(look["score"]) < 4.7 for look in seen["looks"])


def test_it_is_stopped_where_its_samples_are_not_the_policys(report):
    stopped = report("a_guard")
    assert "stopped before step 1: the completions do not come from the policy" in stopped
