"""The shipped base: small, safe, imperfect on purpose, and ignorant of the shipped problems."""

import json
import random

import pytest
from tokenizing import assert_read_alike

from grpo_nb import data, evaluation, models
from grpo_nb.models import chat
from grpo_nb.rewards import load_preset
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import Run, project_path
from grpo_nb.runs.config import resolve

FOLDER = project_path("data/tiny_base")


def test_it_is_small_and_holds_no_pickles():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 4_000_000
    assert not [path for path in FOLDER.iterdir() if path.suffix in (".bin", ".pt", ".pkl")]
    assert (FOLDER / "README.md").exists()


def test_its_script_is_reproducible_and_every_reader_cuts_as_the_training_did(
    tmp_path, monkeypatch
):
    import make_tiny_base

    made = [tmp_path / name for name in "ab"]
    for folder in made:
        monkeypatch.setattr("sys.argv", ["x", "--out", str(folder), "--steps", "2"])
        make_tiny_base.main()
    weights, other = [(folder / "model.safetensors").read_bytes() for folder in made]
    assert weights == other
    shipped = (FOLDER / "tokenizer.json").read_bytes()
    assert (made[0] / "tokenizer.json").read_bytes() == shipped, "it is the script's own"
    path, preset = project_path("data/arithmetic.jsonl"), load_preset("math")
    rows = list(map(json.loads, path.read_text(encoding="utf-8").splitlines()))
    pairs = [(build_prompt(row["question"]), preset.reference(row)) for row in rows]
    assert_read_alike(FOLDER, pairs)


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
