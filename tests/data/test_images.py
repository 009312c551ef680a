"""Rows with images: what is read, what is refused and why, the split, and what lies on disk."""

import io
from copy import copy
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageDraw
from prepared import dropped
from prepared import prepare as prepare_any

import grpo_nb
from grpo_nb.data import images, sources
from grpo_nb.data.rows import pack
from grpo_nb.data.sources import Fault
from grpo_nb.data.split import CONTRADICTORY, LEAKS, REPEATED
from grpo_nb.models import load_tokenizer, template
from grpo_nb.rewards import prompts
from grpo_nb.runs import Run
from grpo_nb.runs.settings import DataConfig

COLORS = ("red", "green", "blue", "yellow", "white", "black", "orange", "purple", "grey", "cyan")


def dot(color, size=(40, 30)):
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((5, 5, 20, 20), fill=color)
    return image


def file_of(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def prepare(rows, **settings):
    return prepare_any(rows, answer_kind="text", max_prompt_tokens=9999, **settings)


@pytest.fixture
def dots(tmp_path, runs_dir):
    """Rows that ask for the color of a file, for each color."""
    (tmp_path / "pictures").mkdir()
    for color in COLORS:
        dot(color).save(tmp_path / f"pictures/{color}.png")
    row = {"question": "Which color?"}
    return [row | {"answer": name, "image": f"pictures/{name}.png"} for name in COLORS]


def same(one, other):
    return one.mode == other.mode == "RGB" and np.array_equal(np.asarray(one), np.asarray(other))


def test_a_row_has_its_images_in_trls_form_and_a_file_that_no_json_needs(dots):
    train, held_out, report = prepare(dots)
    assert (len(train), len(held_out)) == (9, 1), "one question, ten images: no row is a duplicate"
    for row in train + held_out:
        [image] = row["images"]
        system, user = row["prompt"]
        assert isinstance(system["content"], str)
        image_part, text_part = {"type": "image", "image": image}, {"type": "text"}
        assert user["content"] == [image_part, text_part | {"text": row["question"]}]
        assert same(image, dot(row["answer"]))
    assert report["columns"]["image"] == "image" and not report["columns"]["others"]
    stored = pq.read_table(Run("r") / "data/train.parquet").to_pylist()
    assert {type(turn["content"]) for row in stored for turn in row["prompt"]} == {str}
    assert {file[:4] for row in stored for file in row["images"]} == {b"\x89PNG"}
    assert list(map(pack, train)) == stored, "what was read is written again without loss"
    for row in grpo_nb.prepare(report["source"], answer_kind="text", eval_rows=1).train_dataset:
        assert same(row["images"][0], dot(row["answer"])), "TRL takes them"
        assert row["prompt"][-1]["content"] == "Which color?"


def test_a_processor_counts_the_tokens_of_images():
    tokenizer = load_tokenizer("data/vision_base")
    count = partial(template.count_tokens, tokenizer)
    processor = copy(tokenizer.processor)
    processor.tokenizer = copy(tokenizer)
    del processor.tokenizer.processor  # as transformers loads it
    options = {"max_rows": 20, "form": "boxed"}
    ours, theirs = (grpo_nb.prepare("charts", **options, **of) for of in (
        {"processing_class": processor}, {"count_tokens": count}
    ))  # fmt: skip
    assert ours.rows == theirs.rows and ours.report["prompt_tokens"]["max"] > 20
    assert r"\boxed" in ours.rows["train"][0]["prompt"][0]["content"]
    assert not hasattr(processor.tokenizer, "processor")


def test_a_column_of_images_can_be_named_or_left_alone(dots):
    rows = [row | {"question": f"Is it {row['answer']}?"} for row in dots]
    named = [{"picture" if key == "image" else key: row[key] for key in row} for row in rows]
    assert "images" not in prepare(named)[0][0]
    train, *_ = prepare(named, image_column="picture", extra_columns="all")
    assert "images" in train[0] and "picture" not in train[0]
    with pytest.raises(ValueError, match=r"column of .* \(data.image_column\) 'photo'"):
        prepare(named, image_column="photo")
    assert "images" not in prepare(rows, image_column="")[0][0]


# What a cell may hold


def transparent(image):
    image = image.convert("RGBA")
    places = np.asarray(image).copy()
    places[(places[..., :3] == 255).all(axis=-1)] = 0  # black, if the transparency were dropped
    return Image.fromarray(places)


def test_every_kind_of_cell_gives_the_same_image(tmp_path):
    image = dot("red")
    image.save(tmp_path / "red.png")
    (tmp_path / "alias.png").symlink_to("red.png")
    cells = ["red.png", str(tmp_path / "red.png"), "alias.png", file_of(image), image]
    cells += [{"bytes": file_of(image), "path": None}, {"bytes": None, "path": "red.png"}]
    cells += [file_of(image, "WEBP", lossless=True), file_of(image.quantize(8))]
    cells += [file_of(transparent(image))]
    read = images.read_images(cells, tmp_path, "image", 10_000)
    assert len(read) == 10 and all(same(each, image) for each in read)


def test_a_photograph_is_upright_and_keeps_no_metadata():
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned
    exif[0x8825] = {1: "N", 2: (52.0, 31.0, 0.0)}  # where it was taken
    [image] = images.read_images(file_of(dot("red"), "JPEG", exif=exif), None, "image", 10_000)
    assert image.size == (30, 40)
    assert b"eXIf" not in images.encode(image)


@pytest.mark.parametrize("size", [(800, 600), (1, 150), (20_000, 100)])
def test_a_large_image_is_scaled_down_in_its_proportions(size):
    [image] = images.read_images(Image.new("RGB", size), None, "image", 10_000)
    assert image.width * image.height <= 10_000
    if size == (1, 150):
        assert image.size == size, "small ones are not changed"
    else:
        assert image.width * image.height > 9_000
        assert image.width / image.height == pytest.approx(size[0] / size[1], rel=0.15)
    assert same(images.decode(images.encode(image)), image)


# What is refused


DEEP = Image.fromarray(np.full((4, 4), 40_000, np.uint16))
BOMB = Image.new("1", (10_000, 10_000))  # a file of a few bytes that would take 300 MB
UNFIT = [
    (file_of(dot("red"))[:90], images.UNREADABLE, "truncated|broken"),
    (file_of(dot("red"), "GIF"), images.UNREADABLE, "cannot identify image file"),
    (file_of(BOMB), images.UNREADABLE, "decompression bomb"),
    (file_of(DEEP), images.UNREADABLE, "mode I;16: save it with 8 bits"),
    (["red.png", None], images.NO_IMAGE, "None"),
    ("none.png", images.NO_IMAGE, "'none.png' is not a file in"),
    ("a" * 999, images.NO_IMAGE, "is not a file in"),
    ("/etc/passwd", images.OUTSIDE, "is outside"),
    ("link.png", images.OUTSIDE, "is outside"),
    ({"bytes": None, "path": "/etc/passwd"}, images.OUTSIDE, "is outside"),
]


@pytest.mark.parametrize(("cell", "reason", "why"), UNFIT, ids=range(len(UNFIT)))
def test_an_image_that_cannot_be_used_is_a_fault_with_its_reason(tmp_path, cell, reason, why):
    folder = tmp_path / "data"
    folder.mkdir()
    dot("red").save(folder / "red.png")
    dot("red").save(tmp_path / "secret.png")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    with pytest.raises(Fault, match=f"(?s){why}") as raised:
        images.read_images(cell, folder, "image", 10_000)
    assert raised.value.reason == reason


# The split


def test_equal_rows_are_dropped_and_contradictory_ones_by_question_and_images(dots, runs_dir):
    dot("red").save(runs_dir / "pictures/copy.png")
    rows = [*dots, dots[0], dots[1] | {"answer": "pink"}, dots[2] | {"question": "Which shape?"}]
    rows += [dots[0] | {"image": "pictures/copy.png"}]
    train, held_out, report = prepare(rows, max_dropped_share=0.9)
    drops = dropped(report)
    assert drops[REPEATED] == [11, 14], "equal pixels are equal images"
    assert drops[CONTRADICTORY] == [2, 12]
    assert drops.get(LEAKS) in (None, [3], [13])
    assert len(train) + len(held_out) >= 9


def test_no_image_is_on_both_sides_of_the_split_and_few_rows_are_lost(dots):
    asked = [f"Question {number}?" for number in range(6)]
    rows = [row | {"question": f"{text} {row['answer']}"} for row in dots for text in asked]
    train, held_out, report = prepare(rows, eval_rows=15, max_dropped_share=0.5, eval_share=0.5)
    assert len(held_out) == 15
    pictures = [{prompts.digest(row["images"][0]) for row in side} for side in (train, held_out)]
    assert not pictures[0] & pictures[1]
    lost = sum(e["count"] for e in report["dropped"] if e["reason"] == LEAKS)
    assert len(train) == 45 - lost
    assert lost <= 5, "rows of one image stay together"


# Other sources, and what comes back


def test_a_folder_of_datasets_gives_its_images(tmp_path, runs_dir):
    datasets = pytest.importorskip("datasets")
    images = [[dot(color), dot(color, (50, 50))] for color in COLORS]
    rows = {"question": ["Which?"] * 10, "answer": list(COLORS), "images": images}
    rows = datasets.Dataset.from_dict(rows).cast_column("images", datasets.List(datasets.Image()))
    (folder := tmp_path / "set").mkdir()
    rows.to_parquet(folder / "train.parquet")
    for source, streaming in ((folder, True), (folder, False), (folder / "train.parquet", False)):
        train, held_out, _ = prepare(None, source=str(source), streaming=streaming)
        for row in train + held_out:
            assert same(row["images"][0], dot(row["answer"])) and len(row["images"]) == 2


def test_a_broken_image_of_a_dataset_is_a_row_and_not_the_end(tmp_path, runs_dir):
    datasets = pytest.importorskip("datasets")
    files = [{"bytes": file_of(dot(color)), "path": None} for color in COLORS]
    files[3]["bytes"] = files[3]["bytes"][:80]
    rows = {"question": ["Color?"] * 10, "answer": list(COLORS), "image": files}
    rows = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    (tmp_path / "set").mkdir()
    rows.to_parquet(tmp_path / "set/train.parquet")
    *_, report = prepare(None, source=str(tmp_path / "set"), max_dropped_share=0.5)
    assert dropped(report) == {images.UNREADABLE: [4]}


def test_a_path_in_a_hub_dataset_opens_nothing():
    assert sources.folder_of(DataConfig(source="somebody/some-set")) is None
    with pytest.raises(Fault, match="use a local copy"):
        images.read_images("/etc/passwd", None, "image", 10_000)
