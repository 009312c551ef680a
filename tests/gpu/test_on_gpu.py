"""What only a machine with an NVIDIA GPU can show: `pytest -m gpu`."""

import json

import pytest

from grpo_nb import models
from grpo_nb.config import ModelConfig
from grpo_nb.pipeline import run_pipeline
from grpo_nb.runs import Run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("fast_inference", ["off", "detect"])
def test_the_four_notebooks_teach_the_tiny_model(runs_dir, fast_inference):
    settings = {"model.fast_inference": fast_inference, "train.max_steps": 60}
    summary = run_pipeline("gpu", "tiny-cpu", settings)
    greedy = summary["report"]["greedy"]
    assert greedy["base"]["accuracy"] <= 0.45
    assert greedy["merged"]["accuracy"] >= 0.75
    assert greedy["merged"]["format"] >= 0.95
    executed = (Run("gpu") / "notebooks/03_train_grpo.ipynb").read_text(encoding="utf-8")
    by_vllm = models.use_vllm(ModelConfig(fast_inference=fast_inference))
    outputs = json.dumps([cell.get("outputs") for cell in json.loads(executed)["cells"]])
    assert f"completions by {'vLLM' if by_vllm else 'transformers'}" in outputs
