"""What a training leaves for its readers: of the notebooks' run (`demo_run`), and of short ones."""

import json
import re

import numpy as np
import pandas as pd
import pytest
import torch
import trl
from conftest import TINY_SETTINGS
from hypothesis import given
from hypothesis import strategies as st
from trainings import MATH, lines_of, make_run, trainer_of

import grpo_nb
from grpo_nb import models, rewards, stages, training
from grpo_nb.data import load
from grpo_nb.reward_lab.table import advantages
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import flatten, resolve
from grpo_nb.stages import validation

STEPS = TINY_SETTINGS["grpo.max_steps"]
FOUR = {"grpo.max_steps": 4}


def test_our_rewards_and_advantages_are_those_trl_trained_on_and_can_be_read_back(demo_run):
    files = sorted((demo_run / "train/completions").glob("*.parquet"))
    assert len(files) == STEPS
    answers = {str(row["prompt"]): row["answer"] for row in load(demo_run, "train")}
    for path in files:
        table = pd.read_parquet(path)
        completions = [list(completion) for completion in table["completion"]]
        answer = [answers[str([dict(m) for m in prompt])] for prompt in table["prompt"]]
        for func in MATH.reward_funcs:
            scores = func(completions=completions, answer=answer)
            np.testing.assert_allclose(scores, table[func.__name__], atol=1e-6)
        ours = advantages(table[MATH.names].to_numpy(), MATH.reward_weights, num_generations=8)
        np.testing.assert_allclose(ours, table["advantage"], atol=1e-6)
    frame = stages.read_completions(demo_run, MATH)
    assert frame["step"].tolist() == sorted(frame["step"])
    assert len(frame) == STEPS * TINY_SETTINGS["grpo.per_device_train_batch_size"]
    assert frame["correct"].equals(frame["numeric_correctness_reward"] == 1)
    of_question = {row["question"]: row["answer"] for row in load(demo_run, "train")}
    assert frame["reference"].tolist() == [of_question[each] for each in frame["question"]]


def test_the_adapter_is_safetensors_alone_and_has_moved(demo_run):
    from safetensors.numpy import load_file

    names = {path.name for path in (demo_run / "train/adapter").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not [name for name in names if name.endswith((".bin", ".pt", ".pkl"))]
    weights = load_file(demo_run / "train/adapter/adapter_model.safetensors")
    assert any(np.abs(w).max() > 0 for name, w in weights.items() if "lora_B" in name)


@given(st.integers(0, 300), st.integers(0, 80))
def test_rows_held_out_are_few_and_never_trained_on(rows, count):
    train, held_out = validation.hold_out([{"n": n} for n in range(rows)], count)
    assert len(held_out) == min(count, rows // 10)
    assert sorted(row["n"] for row in train + held_out) == list(range(rows))


def test_steps_that_sample_nothing_have_a_line_and_a_validation_too(start):
    fast = {"grpo.learning_rate": 1e-2, "grpo.warmup_steps": 0}
    one = start(**{"grpo.num_iterations": 2, "grpo.max_steps": 4, "train.eval_steps": 2, **fast})
    updates = []
    one.monitor.watchers.append(updates.append)
    one.train()
    lines = training.read_lines(one.folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps if "reward" in line] == [1, 3]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 4]
    assert [bool(u.completions) for u in updates if "loss" in u.line] == [True, False] * 2
    assert steps[1]["clip_ratio/region_mean"] > 0, "the policy has moved since it sampled"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four steps, validated before and after them: the trainer and its updates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("trained")))
        one, updates = trainer_of(make_run("here"), **FOUR, **{"train.eval_steps": 4}), []
        one.stage.record_checks(grpo_nb.preflight(one))
        one.monitor.watchers.append(updates.append)
        one.train()
    return one, updates


def test_an_update_tells_of_each_completion_with_its_total(trained):
    one, (begun, *steps, validated) = trained
    known = one.monitor.watch.expected
    assert known.rewards["soft_format_reward"] == (0.25, 0.0, 1.0)
    assert (known.correct, known.completions, known.eval_rows) == (MATH.names[0], 16, 1)
    for line in [step.line for step in steps]:
        phases = sum(line[f"seconds/{phase}"] for phase in ("generation", "reward", "update"))
        assert phases == pytest.approx(line["step_time"])
        assert line["tokens_per_second"] > 0 and 0.1 < line["memory_gib"] < 24
    assert begun.line["step"] == 0 and "eval/accuracy" in begun.line
    first, last = steps[0], steps[-1]
    assert len(first.completions) == 16
    for each in first.completions:
        scores = [each[name] for name in MATH.names]
        assert each["reward"] == pytest.approx(np.dot(scores, MATH.reward_weights))
        assert {"question", "completion", "advantage"} <= set(each)
    totals = [each["reward"] for each in last.completions]
    assert last.line["reward"] == pytest.approx(np.mean(totals), abs=1e-6)
    assert validated.completions == [] and validated.line["step"] == 4
    assert 0 <= validated.line["eval/accuracy"] <= 1


def test_an_ended_training_says_in_the_manifest_what_it_looks_like(trained):
    checks = trained[0].stage.run.manifest()["03"]["checks"]
    states = {check["name"]: check["state"] for check in checks}
    assert states["memory"] == states["alerts"] == "ok"
    assert states["reward rises"] == "warning", "four steps are too few to tell"
    assert {"context", "gradient", "time"} <= set(states)


def test_validation_leaves_the_training_as_it_would_be_and_the_best_adapter_is_handed_on(
    start, trained, monkeypatch
):
    accuracies, validate = iter([0.3, 0.5, 0.75, 0.75, 0.5]), validation.Validation.__call__

    def figures(self):
        return validate(self) | {"eval/accuracy": next(accuracies)}

    monkeypatch.setattr(validation.Validation, "__call__", figures)
    one = start(**FOUR, **{"train.eval_steps": 1})
    one.train()
    often, seldom = (
        [(line["reward"], line["loss"], line["grad_norm"]) for line in lines_of(each.stage.run)]
        for each in (one, trained[0])
    )
    assert often == seldom
    best = json.loads((one.folder / "best/eval.json").read_text())
    assert (best["step"], best["score"], best["eval/accuracy"]) == (3, 0.75, 0.75)
    kept, best, last = (
        (one.folder / name / "adapter_model.safetensors").read_bytes()
        for name in ("adapter", "best", "checkpoint-4")
    )
    assert kept == best != last


def test_the_policy_writes_as_the_reference_answers_do_after_the_warm_up(runs_dir):
    run = make_run("here", **{"data.sft_rows": 64, "data.max_rows": 200})
    warm = {"train.sft_steps": 30, "train.sft_learning_rate": 4e-3}
    config = resolve("tiny-cpu", flatten(run.config()), warm)
    stage, prompts = Stage(run, "03", config), [row["prompt"] for row in load(run, "train")]

    policy = models.load_policy(config)
    said = stages.warm_up(policy, stage)
    groups = policy.generate(prompts[:64], max_completion_length=32, temperature=1.0, seed=1)
    begins = [group[0].text.startswith("<answer>") for group in groups]
    assert np.mean(begins) > 0.7
    assert said.startswith("30 SFT warm-up steps: loss")
    first, last = re.findall(r"\d\.\d+", said)
    assert float(last) < float(first) / 3
    again = models.load_policy(config)
    assert stages.warm_up(again, stage) == said, "it is done once"
    pairs = zip(policy.model.parameters(), again.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_a_run_starts_from_the_adapter_of_another(start):
    """Two stages of training are two runs: the second begins where the first ended."""
    short = {"grpo.max_steps": 2, "train.eval_steps": 0}
    first = start(**short, **{"grpo.warmup_steps": 0})
    first.train()
    make_run("second")
    second = trainer_of(Run("second"), **{"policy.adapter": "here", "grpo.beta": 0.02, **short})
    weights = {
        one: [p for name, p in one.model.named_parameters() if "lora_B.default" in name]
        for one in (first, second)
    }
    assert all(map(torch.equal, *weights.values()))
    second.train()
    kl = lines_of(Run("second"))[0]["kl"]
    assert kl == pytest.approx(0, abs=1e-3), "the reference is what it starts from"


def test_a_trainer_is_attached_again_and_only_with_the_rewards_that_were_tested(start):
    """As in a notebook whose cell runs twice, and in one whose trainer got other rewards."""
    one = start(**{"grpo.max_steps": 1, "train.eval_steps": 0})
    callbacks = [type(each).__name__ for each in one.callback_handler.callbacks]
    stages.attach(one, one.stage, one.rewards, one.validation_rows, one.policy)
    assert [type(each).__name__ for each in one.callback_handler.callbacks] == callbacks
    one.train()
    assert one.state.global_step == 1
    other = rewards.reward_set([(rewards.soft_format_reward, 1.0)])
    stock = trl.GRPOTrainer(
        model=one.policy.model,
        processing_class=one.policy.tokenizer,
        reward_funcs=list(one.rewards.reward_funcs),
        args=one.args,
        train_dataset=one.train_dataset,
    )
    with pytest.raises(ValueError, match="and the run soft_format_reward: write yours in noteb"):
        stages.attach(stock, one.stage, other)
