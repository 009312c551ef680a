"""The base of arithmetic: imperfect on purpose, and ignorant of the shipped problems."""

import random

import pytest

from grpo_nb import data, evaluation, models
from grpo_nb.models import chat
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve


@pytest.mark.parametrize("quantization", ["16bit", "4bit"])
def test_it_starts_with_room_to_improve(runs_dir, quantization):
    config = resolve("tiny-cpu", {"data.eval_share": 0.25})
    tokenizer = chat.load_tokenizer(config.model.model_path)
    data.prepare(Run("r"), config.data, 0, lambda prompts: [0] * len(prompts))
    held_out = data.load(Run("r"), "eval")[::2]
    model = models.load_checkpoint(config.model.model_path, adapter=None, quantization=quantization)
    engine = models.TransformersEngine(model, tokenizer)
    table = evaluation.evaluate_model(engine, held_out, load_preset("math"), config)
    lines = table.groupby("decoding")[["accuracy", "format"]].mean()
    assert 0.55 <= lines["accuracy"]["sampled"] <= 0.7
    assert 0.45 <= lines["format"]["sampled"] <= 0.75
    assert lines["accuracy"]["greedy"] <= 0.7


def test_chats_of_its_training_never_hold_a_shipped_problem(monkeypatch):
    import make_arithmetic
    import make_tiny_base

    shipped = make_arithmetic.read_problems()
    assert len(shipped) == make_arithmetic.ROWS
    draws = random.Random(1)
    drawn = {make_arithmetic.sample_problem(draws) for _ in range(20_000)}
    assert drawn & shipped, "the sampler could draw them"
    seen = []
    steps = make_tiny_base.column_steps
    monkeypatch.setattr(
        make_tiny_base, "column_steps", lambda p, forget: (seen.append(p), steps(p, forget))[1]
    )
    rng = random.Random(2)
    for _ in range(5000):
        make_tiny_base.sample_chat(shipped, rng)
    assert len(seen) == 5000
    assert not set(seen) & shipped


@pytest.mark.parametrize("problem", [(47, "+", 38), (52, "-", 17), (99, "+", 99), (40, "-", 40)])
def test_its_lessons_are_right_unless_they_forget(problem):
    import make_arithmetic
    import make_tiny_base

    right = make_arithmetic.result(problem)
    assert make_tiny_base.column_steps(problem, forget=False)[1] == right
    off = make_tiny_base.column_steps(problem, forget=True)[1] - right
    has_carry = problem in [(47, "+", 38), (52, "-", 17), (99, "+", 99)]
    assert abs(off) == (10 if has_carry else 0)
