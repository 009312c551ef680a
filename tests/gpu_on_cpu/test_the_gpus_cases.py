"""What tests/gpu asserts, as far as a CPU can run it: so its constants are never out of date."""

import json
import os
import subprocess
import sys
from pathlib import Path

import forked
import pytest

from grpo_nb.files import read_json
from grpo_nb.machine import PROJECT_ROOT

FOLDER = Path(__file__).parents[1] / "gpu"
sys.path.append(str(FOLDER))
import two_steps  # noqa: E402


@pytest.mark.parametrize(
    "settings", [{"policy.backend": "transformers"}, {"model.fast_inference": "off"}]
)
def test_two_steps_train_and_the_next_answers_are_the_new_adapters(settings, forks, tmp_path):
    """As on a GPU, but with nothing checkpointed and without vLLM."""
    paths = {"PYTHONPATH": str(PROJECT_ROOT), "GRPO_NB_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    python = forked.python() if "policy.backend" in settings else [sys.executable]  # Unsloth first
    command = [*python, str(FOLDER / "two_steps.py"), json.dumps(settings), str(tmp_path)]
    done = subprocess.run(
        command, env=os.environ | paths, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = read_json(tmp_path / "report.json")
    two_steps.judge(report, checkpointed=False)
    assert report["vllm"] is False


def test_the_bases_accuracy_is_in_the_range_that_a_gpu_is_held_to(demo_run):
    greedy = read_json(demo_run / "eval/report.json")["greedy"]
    low, high = two_steps.BASE_ACCURACY
    assert low <= greedy["base"]["accuracy"] <= high
