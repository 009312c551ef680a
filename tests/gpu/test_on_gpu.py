"""What only a machine with an NVIDIA GPU can show: `pytest -m gpu`."""

import json

import pytest

from grpo_nb import models
from grpo_nb.config import ModelConfig
from grpo_nb.pipeline import run_pipeline
from grpo_nb.prompts import build_prompt
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


def test_vllm_answers_with_the_adapter_as_it_stands():
    policy = models.load_policy(ModelConfig(), seed=0)
    if not policy.vllm:
        pytest.skip("vllm is not installed")
    prompts = [build_prompt(f"What is {a} + {b}?") for a, b in ((47, 38), (12, 34), (99, 9))]
    before = policy.generate(prompts, max_completion_length=48)
    assert policy.generate(prompts, max_completion_length=48) == before
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.05)
    assert policy.generate(prompts, max_completion_length=48) != before


@pytest.mark.parametrize("quantization", ["4bit", "16bit"])
def test_both_engines_answer_alike(quantization):
    prompts = [build_prompt(f"What is {a} + {a + 7}?") for a in range(32)]
    answers = {}
    for name in ("transformers", "vllm"):
        engine = models.open_engine(
            "data/tiny_base", adapter=None, quantization=quantization, engine=name
        )
        answers[name] = engine.generate(prompts, max_completion_length=48)
        engine.close()
    same = zip(answers["transformers"], answers["vllm"], strict=True)
    assert sum(ours == theirs for ours, theirs in same) >= 26
