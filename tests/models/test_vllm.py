"""vLLM's answers, on a GPU or by its build for CPUs: `pytest -m vllm`, see docs/performance.md."""

import importlib.util

import pytest
from conftest import moved

from grpo_nb import models
from grpo_nb.models.engine import open_vllm
from grpo_nb.rewards.prompts import build_prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None,
        reason="vllm is not installed; docs/performance.md says how, also without a GPU",
    ),
]
TINY = "data/tiny_base"
PROMPTS = [build_prompt(f"What is {a} + {a + 7}?") for a in range(16)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """In 16 bit."""
    return moved(tmp_path_factory.mktemp("runs"), 0.1, {"model.load_in_4bit": False})


def texts(answers):
    return [group[0].text for group in answers]


def equal(ours, theirs):
    """The share of equal answers; what differs otherwise lies within the rounding of bf16."""
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def opened(adapter, name):
    tokenizer = models.load_tokenizer(TINY)
    if name == "vllm":
        return open_vllm(TINY, adapter, "16bit", 0.5, tokenizer)
    model = models.load_checkpoint(TINY, adapter=adapter, quantization="16bit")
    return models.TransformersEngine(model, tokenizer)


def test_vllm_answers_as_transformers_does(run):
    """Base and adapter, greedily and sampled."""
    adapter, greedy = run / "train/adapter", {}
    for folder in (None, adapter):
        for name in ("transformers", "vllm"):
            engine = opened(folder, name)
            assert engine.name == name
            greedy[name, folder] = engine.generate(PROMPTS, max_completion_length=48)
            if (name, folder) == ("vllm", None):
                engine.close()
        assert equal(greedy["vllm", folder], greedy["transformers", folder]) >= 0.8
    assert equal(greedy["vllm", adapter], greedy["vllm", None]) <= 0.25

    def sample(seed):
        settings = {"temperature": 1.0, "num_generations": 4, "seed": seed}
        return engine.generate(PROMPTS, max_completion_length=48, **settings)

    assert [len(group) for group in sample(1)] == [4] * len(PROMPTS)
    assert sample(1) == sample(1) != sample(2)
    assert len({one.text for one in sample(1)[0]}) > 1
    ((cut,),) = engine.generate(PROMPTS[:1], max_completion_length=3)
    assert (cut.tokens, cut.truncated) == (3, True)
    below = engine.generate(PROMPTS, max_completion_length=48, adapter=False)
    assert equal(texts(below), texts(greedy["vllm", None])) >= 0.8
    engine.close()
