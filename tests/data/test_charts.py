"""The charts: drawn as the script says, read from the image alone, unseen by the base."""

import json
import random
from collections import Counter, defaultdict

import make_charts
import make_vision_base
import pytest
from PIL import Image

from grpo_nb.files import project_path

FOLDER = project_path("data/tasks")


@pytest.fixture(scope="module")
def rows():
    text = (FOLDER / "charts.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


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
