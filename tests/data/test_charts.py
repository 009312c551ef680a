"""The charts and their base: drawn as the script says, read from the image alone, half known."""

import json
import random
from collections import Counter, defaultdict

import make_charts
import make_vision_base
import pytest
import torch
from PIL import Image

from grpo_nb.files import digests, project_path
from grpo_nb.machine import PROJECT_ROOT

BASE = project_path("data/vision_base")
FOLDER = project_path("data/tasks")


@pytest.fixture(scope="module")
def rows():
    text = (FOLDER / "charts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def charts_trl(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT_ROOT / "benchmarks")
    import charts_trl

    return charts_trl


def pixels(image):
    return image.size, image.convert("RGB").tobytes()


def test_the_set_is_what_its_script_draws(rows):
    made = make_charts.sample_set()
    assert rows == [json.loads(json.dumps(row)) for row, _ in made]
    assert len(rows) == make_charts.ROWS
    for row, image in made:
        assert pixels(Image.open(FOLDER / row["image"])) == pixels(image)
    files = list((FOLDER / "charts").iterdir())
    assert {file.name for file in files} == {row["image"].partition("/")[2] for row in rows}
    assert sum(file.stat().st_size for file in files) < 600_000


def test_a_guess_without_the_image_is_right_in_one_of_five(rows):
    answers = defaultdict(Counter)
    for row in rows:
        answers[row["question"]][int(row["answer"])] += 1
    assert sum(answers.values(), Counter()) == {number: len(rows) // 5 for number in range(1, 6)}
    best = sum(max(counts.values()) for counts in answers.values())
    assert best / len(rows) < 0.25


def test_the_training_of_the_base_leaves_the_charts_out():
    rng, charts = random.Random(1), make_charts.read_charts()
    assert len(charts) == make_charts.ROWS
    draws = [make_charts.sample_problem("count", 3, rng).chart for _ in range(1000)]
    assert charts & set(draws), "the sampler could draw them"
    drawn = {make_vision_base.sample_training_problem(charts, rng).chart for _ in range(5000)}
    assert not drawn & charts


def test_the_script_of_the_base_is_reproducible(tmp_path, monkeypatch):
    monkeypatch.setattr(make_vision_base, "LESSONS", [(False, 1), (True, 1)])
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        monkeypatch.setattr("sys.argv", ["x", "--out", str(folder)])
        make_vision_base.main()
    first, again = (digests(folder) for folder in folders)
    assert first == again
    del first["model.safetensors"]  # trained for longer
    assert first.items() <= digests(BASE).items()


def test_the_base_looks_at_the_chart_and_half_knows_the_task(charts_trl):
    processor, model = charts_trl.load_base()
    torch.manual_seed(0)
    shares = charts_trl.measure(model, processor, charts_trl.read_rows(seed=0)[:90])
    assert 0.2 <= shares["sampled"] <= 0.5
    assert 0.2 <= shares["greedy"] <= 0.5
    assert shares["sampled format"] >= 0.5
    assert shares["swapped"] <= 0.25
