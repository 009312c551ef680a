"""What only a machine with an NVIDIA GPU can show: `pytest -m gpu`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_nb import models
from grpo_nb.files import read_json
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline.notebooks import run_pipeline
from grpo_nb.training import guard

sys.path.append(str(Path(__file__).parent))
import two_steps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fast_inference", ["off", "detect"])
def test_the_four_notebooks_teach_the_tiny_model(runs_dir, fast_inference):
    settings = {"model.fast_inference": fast_inference, "grpo.max_steps": 60}
    run = run_pipeline("gpu", "tiny-cpu", settings)
    greedy = read_json(run / "eval/report.json")["greedy"]
    low, high = two_steps.BASE_ACCURACY
    assert low <= greedy["base"]["accuracy"] <= high
    assert greedy["merged"]["accuracy"] >= 0.75
    assert greedy["merged"]["format"] >= 0.95
    cells = read_json(run / "notebooks/03_train_grpo.ipynb")["cells"]
    outputs = json.dumps([cell.get("outputs") for cell in cells])
    by_vllm = models.use_vllm(fast_inference, "4bit")
    assert f"completions by {'vLLM' if by_vllm else 'transformers'}" in outputs


def report_of(script, argument, folder):
    """What a script beside this file reports of its training, in a process of its own."""
    command = [sys.executable, Path(__file__).with_name(script), argument, folder]
    path = os.pathsep.join([str(PROJECT_ROOT), *os.environ.get("PYTHONPATH", "").split()])
    variables = os.environ | {"PYTHONPATH": path, "GRPO_NB_RUNS": str(folder)}
    subprocess.run(command, env=variables, check=True)
    return read_json(folder / "report.json")


VLLM = {"model.fast_inference": "vllm"}
# Settings, and what the report of tests/gpu/two_steps.py says of them.
CASES = {
    "Unsloth generates": ({"model.fast_inference": "off"}, {"vllm": False}),
    "vLLM generates": (VLLM, {"vllm": True, "sleeps": False}),
    "vLLM stands by": (VLLM | {"model.unsloth_vllm_standby": True}, {"vllm": True, "sleeps": True}),
    "transformers": ({"policy.backend": "transformers"}, {"vllm": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_two_steps_train_and_the_next_answers_are_the_new_adapters(case, tmp_path):
    settings, expected = CASES[case]
    if settings.get("model.fast_inference") == "vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
    report = report_of("two_steps.py", json.dumps(settings), tmp_path)
    assert expected.items() <= report.items()
    two_steps.judge(report)
    if "policy.backend" in settings:
        assert report["shares prompts"]


@pytest.mark.parametrize("loader", ["trl", "unsloth", "unsloth-vllm"])
def test_our_lines_beside_a_notebook_of_unsloths_or_trls(loader, tmp_path):
    if loader == "unsloth-vllm":
        pytest.importorskip("vllm", reason="vllm is not installed")
    report = report_of("stock_notebook.py", loader, tmp_path)
    assert report["vLLM"] == (loader == "unsloth-vllm")
    assert set(report["preflight"]) <= {"ok", "warning"}
    assert report["alerts"] == []
    assert sum(report["right"][-8:]) > sum(report["right"][:8]) + 1
    assert all(abs(score) < guard.SCORE for score in report["scores"])
