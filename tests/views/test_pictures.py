"""Images beside prompt and completions: small, few, and the right ones."""

import base64
import io
import re

import numpy as np
import pandas as pd
import pytest
from pictures import FORM, ROWS, half_seen, seen
from PIL import Image

from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest
from grpo_nb.reward_lab.base_model import flagged
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import load_preset
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.views import completions, score_sheet
from grpo_nb.views.tables import IMAGE_SIDE, SHOWN_IMAGES

QA = load_preset("qa")
NOTEBOOK = 300_000  # bytes, at most
URI = re.compile(r"<img alt='image' src='data:image/png;base64,([^']+)'>")


def shown(page):
    return [
        Image.open(io.BytesIO(base64.b64decode(uri))).convert("RGB") for uri in URI.findall(page)
    ]


def photo(seed, size=(900, 700)):
    """Noise: nothing compresses worse."""
    noise = np.random.default_rng(seed).integers(0, 256, (*size[::-1], 3), np.uint8)
    return Image.fromarray(noise)


@pytest.fixture
def tried(runs_dir):
    groups = [
        [Sample(FORM.format(half_seen(row["images"][0], n)), 9, False) for n in range(4)]
        for row in ROWS[:3]
    ]
    stage = Stage(Run("lab"), "02", resolve("tiny-cpu", {}))
    return RewardTest(stage, ROWS[:3], Baseline(ROWS[:3], groups), Bench(QA))


def test_the_score_sheet_and_the_table_show_the_image_of_the_prompt(tried):
    table = tried.table()
    for place in range(3):
        [image] = shown(score_sheet(table[4 * place :][:4], QA))
        assert seen(image) == ROWS[place]["answer"]
    lines = flagged(tried.baseline, table, QA)
    page = completions(lines[lines["question"] == "Which color?"].iloc[[0, 4, 8]])
    assert [seen(image) for image in shown(page)] == [row["answer"] for row in ROWS[:3]]
    assert "PIL" not in page and "PIL" not in repr(page)
    assert "images" in page


def test_however_many_and_large_the_images_are_the_pages_are_small():
    images = [photo(seed) for seed in range(6)]
    bench, row = Bench(QA), ROWS[0] | {"images": images}
    group = bench.table([row], [["?"] * 8]).assign(images=[images] * 8)
    sheet = score_sheet(group, QA)
    assert len(shown(sheet)) == SHOWN_IMAGES
    frame = pd.DataFrame([{"question": "?", "completion": "!", "images": images}] * 20)
    page = completions(frame)
    assert len(shown(page)) == SHOWN_IMAGES**2
    assert len(sheet) + len(page) < NOTEBOOK
    assert all(max(image.size) == IMAGE_SIDE for image in shown(page))
    assert images[0].size == (900, 700), "the images themselves stay as they are"
