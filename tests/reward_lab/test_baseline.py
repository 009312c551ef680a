"""Baseline rollouts: their cache, figures and checks."""

from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb import models, stats
from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, baseline, gate
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve

SUMS = {f"{i} + 1?": str(i + 1) for i in range(6)}
ROWS = [
    {"prompt": build_prompt(q), "question": q, "answer": expected} for q, expected in SUMS.items()
]
SMALL = {"rewards.baseline_completions": 2, "grpo.max_completion_length": 8}
CONFIG = resolve("tiny-cpu", SMALL)


@pytest.fixture
def asked(monkeypatch):
    """What another engine, in the place of the base model's, was asked for."""
    calls = []

    def generate(prompts, **_):
        calls.append([prompt[-1]["content"] for prompt in prompts])
        return [[Sample(f"½ {text}", 3, False), Sample("", 8, True)] for text in calls[-1]]

    engine = SimpleNamespace(name="scripted", generate=generate, close=lambda: None)
    monkeypatch.setattr(models, "open_engine", lambda *_, **__: engine)
    return calls


def test_only_missing_prompts_are_sampled(runs_dir, asked):
    run = Run("p")
    first = baseline.sample(run, ROWS[:3], CONFIG)
    assert baseline.sample(run, ROWS[:3], CONFIG) == first
    more = baseline.sample(run, ROWS[::-1], CONFIG)
    assert asked == [["0 + 1?", "1 + 1?", "2 + 1?"], ["5 + 1?", "4 + 1?", "3 + 1?"]]
    assert [group[0].text[2:] for group in more.samples_P_G] == [*SUMS][::-1]


@pytest.mark.parametrize("key", ["seed", "grpo.temperature", "model.model_name"])
def test_what_the_samples_depend_on_is_sampled_again(runs_dir, tmp_path, asked, key):
    value = str(tmp_path) if key == "model.model_name" else 2
    (tmp_path / "config.json").touch()
    for layer in ({}, {"rewards.preset": "qa", "grpo.max_steps": 9}, {key: value}, {key: value}):
        baseline.sample(Run("p"), ROWS[:1], resolve("tiny-cpu", SMALL | layer))
    (tmp_path / "model.safetensors").write_bytes(b"other weights in the same folder")
    baseline.sample(Run("p"), ROWS[:1], resolve("tiny-cpu", SMALL | {key: value}))
    assert len(asked) == (3 if key == "model.model_name" else 2)


def test_the_tiny_base_samples_really_and_once(runs_dir, monkeypatch):
    first = baseline.sample(Run("p"), ROWS[:4], CONFIG)
    assert [len(group) for group in first.samples_P_G] == [2] * 4
    assert all(one.tokens == 8 if one.truncated else one.tokens <= 8 for one in first.samples)
    monkeypatch.setattr(models, "open_engine", None)
    assert baseline.sample(Run("p"), ROWS[:4], CONFIG) == first


@given(st.lists(st.tuples(*[st.booleans()] * 6), min_size=1, max_size=4), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(right, k):
    drawn = [[any(draw) for draw in combinations(group, k)] for group in right]
    assert stats.pass_at_k(np.array(right), k).mean() == pytest.approx(np.mean(drawn))


def test_the_summary_says_what_training_will_meet():
    samples = [Sample("", 16, i < 6) for i in range(100)]  # more than 5 % are cut at 48
    assert gate.recommended_length(samples, 48) == 96
    assert gate.recommended_length(samples[2:], 48) == 24  # a quarter above, in eights
    texts = [["1", "1"], ["2", "3"], ["0", ""]]  # always, once and never right
    samples = [[Sample(text, 4, not text) for text in group] for group in texts]
    tried, preset = baseline.Baseline(ROWS[:3], samples), load_preset("math")
    table = Bench(preset).table(tried.rows, texts)
    figures = gate.summary(tried, table, CONFIG)
    expected = {f"prompts {kind}": 1 for kind in ("never solved", "always solved")}
    expected |= {"prompts": 3, "completions per prompt": 2, "pass@1": 0.5, "pass@2": 2 / 3}
    expected |= {"share of zero-advantage groups": 2 / 3, "share truncated": 1 / 6}
    expected |= {"share of groups all right or all wrong": 2 / 3}
    expected |= {f"completion tokens, {name}": 4 for name in ("mean", "p95", "max")}
    expected |= {"max_completion_length": 8, "recommended max_completion_length": 16}
    assert figures == pytest.approx(expected)
    assert table["correct"].tolist() == [True, True, True, False, False, False]


@pytest.mark.parametrize(
    ("figures", "states"),
    [
        ({}, ["ok", "ok"]),
        ({"pass@1": 0.0}, ["warning", "ok"]),
        ({"share of zero-advantage groups": 1.0}, ["stop", "ok"]),
        ({"recommended max_completion_length": 40}, ["ok", "warning"]),
        ({"recommended max_completion_length": 40, "share truncated": 0.01}, ["ok", "ok"]),
        ({"recommended max_completion_length": 40, "share truncated": 0.01,
          "completion tokens, p95": 33.0}, ["ok", "warning"]),
    ],
)  # fmt: skip
def test_the_checks_of_base_and_length(figures, states):
    known = {"pass@1": 0.5, "share of zero-advantage groups": 0.5, "max_completion_length": 32}
    known |= {"recommended max_completion_length": 32, "share truncated": 0.1}
    known |= {"share of groups all right or all wrong": 0.5}
    checks = gate.base_checks(known | {"completion tokens, p95": 24.0} | figures)
    assert [check.name for check in checks] == ["base model", "completion length"]
    assert [check.state for check in checks] == states
    assert [bool(check.fix) for check in checks] == [state != "ok" for state in states]
    again = gate.base_checks(known | {"completion tokens, p95": 24.0} | figures, warm_steps=40)
    assert states[0] == "ok" or "train.sft_steps = 160" in again[0].fix, "more than is set"
