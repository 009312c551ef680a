"""What a real run of the four notebooks left behind (fixture `demo_run`)."""

import numpy as np
import pandas as pd
import pytest
from conftest import TINY_SETTINGS

from grpo_nb import models, training
from grpo_nb.data import load
from grpo_nb.models import chat
from grpo_nb.reward_lab.advantages import advantages
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Stage
from grpo_nb.runs.config import resolve
from grpo_nb.training import plan

MATH = load_preset("math")
STEPS = TINY_SETTINGS["train.max_steps"]


def test_there_is_a_line_of_metrics_for_each_step(demo_run):
    lines = training.read_lines(demo_run / "train/metrics.jsonl")
    metrics = [line for line in lines if "reward" in line]
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    for name in MATH.names:
        assert all(0 <= line[f"rewards/{name}/mean"] <= 1 for line in metrics)
        assert all(line[f"{name}/skipped"] == 0 for line in metrics)


def test_our_advantages_are_those_trl_trained_on(demo_run):
    files = sorted((demo_run / "train/1-grpo/completions").glob("*.parquet"))
    assert len(files) == STEPS
    for path in files:
        table = pd.read_parquet(path)
        ours = advantages(table[MATH.names].to_numpy(), MATH.reward_weights, num_generations=8)
        np.testing.assert_allclose(ours, table["advantage"], atol=1e-6)


def test_the_rewards_trl_logged_are_those_of_the_bench(demo_run):
    table = pd.read_parquet(sorted((demo_run / "train/1-grpo/completions").glob("*.parquet"))[-1])
    answers = {str(row["prompt"]): row["answer"] for row in load(demo_run, "train")}
    completions = [list(completion) for completion in table["completion"]]
    gold = [answers[str([dict(m) for m in prompt])] for prompt in table["prompt"]]
    for func in MATH.reward_funcs:
        scores = func(completions=completions, answer=gold)
        np.testing.assert_allclose(scores, table[func.__name__], atol=1e-6)


def test_the_completions_of_training_can_be_read_back(demo_run):
    tokenizer = chat.load_tokenizer("data/tiny_base")
    frame = training.read_completions(demo_run, MATH, tokenizer, cap_tokens=48)
    assert frame["step"].tolist() == sorted(frame["step"])
    assert len(frame) == STEPS * TINY_SETTINGS["train.per_device_train_batch_size"]
    assert frame["correct"].equals(frame["numeric_correctness_reward"] == 1)
    questions = {row["question"] for row in load(demo_run, "train")}
    assert set(frame["question"]) <= questions


def test_the_adapter_is_safetensors_alone_and_has_moved(demo_run):
    from safetensors.numpy import load_file

    names = {path.name for path in (demo_run / "train/adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    weights = load_file(demo_run / "train/adapter/adapter_model.safetensors")
    assert any(np.abs(w).max() > 0 for name, w in weights.items() if "lora_B" in name)


def test_the_merged_model_is_the_policy_that_was_trained(demo_run):
    """Close to the adapter on its 4-bit base, in probabilities and not in argmax alone."""
    import torch

    config = demo_run.config()
    base, adapter = config.model.model_path, demo_run / "train/adapter"
    tuned = models.load_checkpoint(base, adapter=adapter, quantization="4bit")
    merged = models.load_checkpoint(
        str(demo_run / "model/merged"), adapter=None, quantization="16bit"
    )
    tokenizer = chat.load_tokenizer(str(demo_run / "model/merged"))
    texts = [chat.render(tokenizer, row["prompt"]) for row in load(demo_run, "eval")]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        p, q = (m(**batch).logits[:, -1].float().log_softmax(-1) for m in (tuned, merged))
        with tuned.disable_adapter():
            r = tuned(**batch).logits[:, -1].float().log_softmax(-1)
    kl_merged = (p.exp() * (p - q)).sum(-1).mean()
    kl_base = (p.exp() * (p - r)).sum(-1).mean()
    assert kl_merged < 1e-3
    assert kl_base > kl_merged, "the adapter does nothing"


def test_a_nan_metric_is_stored_as_null(tmp_path):
    training.append_line(tmp_path / "m.jsonl", {"step": 1, "kl": float("nan")})
    assert training.read_lines(tmp_path / "m.jsonl") == [{"step": 1, "kl": None}]


def test_the_installed_trl_takes_our_arguments(tmp_path):
    from trl import GRPOConfig

    config = resolve("tiny-cpu", {"train.loss_type": "dr_grpo", "train.scale_rewards": "none"})
    arguments = GRPOConfig(**training.grpo_arguments(config, tmp_path, vllm=False))
    assert arguments.max_steps == config.train.max_steps
    assert arguments.scale_rewards == "none"
    assert arguments.generation_batch_size % arguments.num_generations == 0


@pytest.mark.parametrize("picture", ["prompt_lengths", "training", "before_after"])
def test_pictures_are_on_disk(demo_run, picture):
    data = (demo_run / f"figures/{picture}.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 5000


def test_alerts_of_a_training_are_kept(demo_run):
    """Four steps are too few for any rule but that of slow steps, which is the machine's."""
    rules = {line["rule"] for line in training.read_lines(demo_run / "train/health.jsonl")}
    assert rules <= {"slow steps"}


def test_health_knows_the_rewards_and_the_predicted_step(demo_run):
    (only,) = plan.plan(demo_run.config(), MATH, [{}])
    known = training.expected(only, Stage(demo_run, "03", demo_run.config(), {}))
    assert known.rewards["soft_xml_format_reward"] == (0.25, 0.0, 1.0)
    assert list(known.rewards) == MATH.names
    assert known.completions == TINY_SETTINGS["train.per_device_train_batch_size"]
    assert 0 < known.step_seconds < 100
