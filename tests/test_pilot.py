"""The pilot: its cache, its figures, and one real sampling by the tiny base model."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_nb import models
from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, pilot
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve

SUMS = {f"{i} + 1?": str(i + 1) for i in range(6)}
ROWS = [{"prompt": build_prompt(q), "question": q, "answer": gold} for q, gold in SUMS.items()]
SMALL = {"rewards.pilot_completions": 2, "train.max_completion_length": 8}
CONFIG = resolve("tiny-cpu", SMALL)


class Sampler(list):  # another engine, and what it was asked for
    def __call__(self, prompts):
        self.append([prompt[-1]["content"] for prompt in prompts])
        return [[Sample(f"½ {text}", 3, False), Sample("", 8, True)] for text in self[-1]]


def test_only_missing_prompts_are_sampled(runs_dir):
    run, asked = Run("p"), Sampler()
    first = pilot.sample(run, ROWS[:3], CONFIG, asked)
    assert pilot.sample(run, ROWS[:3], CONFIG, asked) == first
    more = pilot.sample(run, ROWS[::-1], CONFIG, asked)
    assert asked == [["0 + 1?", "1 + 1?", "2 + 1?"], ["5 + 1?", "4 + 1?", "3 + 1?"]]
    assert [group[0].text[2:] for group in more.samples_P_G] == [*SUMS][::-1]


@pytest.mark.parametrize("key", ["seed", "train.temperature", "model.model_path"])
def test_what_the_samples_depend_on_is_sampled_anew(runs_dir, tmp_path, key):
    asked, value = Sampler(), str(tmp_path) if key == "model.model_path" else 2
    (tmp_path / "config.json").touch()
    for layer in ({}, {"rewards.preset": "qa", "train.max_steps": 9}, {key: value}, {key: value}):
        pilot.sample(Run("p"), ROWS[:1], resolve("tiny-cpu", SMALL | layer), asked)
    (tmp_path / "model.safetensors").touch()  # other weights in the same folder
    pilot.sample(Run("p"), ROWS[:1], resolve("tiny-cpu", SMALL | {key: value}), asked)
    assert len(asked) == (3 if key == "model.model_path" else 2)


def test_the_tiny_base_samples_really_and_once(runs_dir, monkeypatch):
    first = pilot.sample(Run("p"), ROWS[:4], CONFIG)
    assert [len(group) for group in first.samples_P_G] == [2] * 4
    assert all(one.tokens == 8 if one.truncated else one.tokens <= 8 for one in first.samples)
    assert first.step_seconds(64) > first.step_seconds(8) > 8 * first.generation_seconds > 0
    monkeypatch.delattr(models, "open_engine")
    assert pilot.sample(Run("p"), ROWS[:4], CONFIG) == first


@given(st.lists(st.tuples(*[st.booleans()] * 6), min_size=1, max_size=4), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_all_draws_that_hold_a_right_one(right, k):
    drawn = [[any(draw) for draw in combinations(group, k)] for group in right]
    assert pilot.pass_at_k(np.array(right), k).mean() == pytest.approx(np.mean(drawn))


def test_the_summary_says_what_training_will_meet():
    samples = [Sample("", 16, i < 6) for i in range(100)]  # more than 5 % are cut at 48
    assert pilot.recommended_length(samples, 48)[0] == 96
    assert pilot.recommended_length(samples[2:], 48)[0] == 24  # a quarter above, in eights
    texts = [["1", "1"], ["2", "3"], ["0", ""]]  # always, once and never right
    samples = [[Sample(text, 4, not text) for text in group] for group in texts]
    tried, preset = pilot.Pilot(ROWS[:3], samples, 0.5, 0.25), load_preset("math")
    table = Bench(preset).table(tried.rows, texts)
    figures = pilot.summary(tried, table, preset, CONFIG)
    assert figures.pop("because") == "17% of the completions ran into 8 tokens"
    expected = {f"prompts {kind}": 1 for kind in ("never solved", "always solved", "to keep")}
    expected |= {"prompts": 3, "completions per prompt": 2, "pass@1": 0.5, "pass@2": 2 / 3}
    expected |= {"share of groups without signal": 2 / 3, "share truncated": 1 / 6}
    expected |= {f"completion tokens, {name}": 4 for name in ("mean", "p95", "max")}
    expected |= {"predicted seconds per step": 64 * 1.5, "max_completion_length": 8}
    assert figures == pytest.approx(expected | {"recommended max_completion_length": 16})
