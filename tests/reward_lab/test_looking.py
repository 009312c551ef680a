"""Whether the base and the rewards need the images, with a model that reads pixels by a script."""

import json
from itertools import pairwise

import pandas as pd
import pytest
from pictures import COLORS, ROWS, SYSTEM, Looker, blind, half_seen, picture, row_of, seen

from grpo_nb import data, reward_lab
from grpo_nb.data import images
from grpo_nb.reward_lab import Bench, check_rewards, looking
from grpo_nb.reward_lab.baseline import KEPT_AT
from grpo_nb.reward_lab.difficulty import by_difficulty
from grpo_nb.rewards import load_preset, reward, reward_set
from grpo_nb.rewards.prompts import as_text, digest
from grpo_nb.runs import Stage, start_stage
from grpo_nb.runs.config import flatten, resolve

QA = load_preset("qa")
SETTINGS = {
    "data.answer_kind": "text",
    "data.system_prompt": SYSTEM,
    "data.eval_rows": 8,
}
REWARDS = {
    "rewards.preset": "qa",
    "rewards.baseline_prompts": 16,
    "rewards.baseline_completions": 4,
}


@pytest.fixture
def stage(runs_dir):
    """Stage 02 of a run with 40 pictures."""
    rows = [row_of(number) for number in range(40)]
    for number, row in enumerate(rows):
        row["images"][0].save(runs_dir / f"{number}.png")
    lines = [
        {"question": row["question"], "answer": row["answer"], "image": f"{number}.png"}
        for number, row in enumerate(rows)
    ]
    source = runs_dir / "rows.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    stage = start_stage("01", "seen", SETTINGS | {"data.source": str(source)}, profile="tiny-cpu")
    data.prepare_run(stage.run, stage.config.data, 0, lambda prompts: [10] * len(prompts), QA)
    stage.finish("data")
    return start_stage("02", "seen", REWARDS)


def judged(stage, answer, preset=QA):
    test = reward_lab.open_test(stage, preset, Looker(answer))
    verdict = reward_lab.judge(test)
    reward_lab.save(test, verdict)
    return verdict


def test_every_row_is_shown_another_image_and_a_grey_one_of_its_size():
    swapped, blank = images.variants(ROWS).values()
    for row, other, grey in zip(ROWS, swapped, blank, strict=True):
        assert as_text(row["prompt"]) == as_text(other["prompt"]) == as_text(grey["prompt"])
        assert other["prompt"][-1]["content"][0]["image"] is other["images"][0]
        assert seen(other["images"][0]) != row["answer"], "the right answer is another one"
        assert grey["images"][0].size == row["images"][0].size
        assert seen(grey["images"][0]) == "grey"
        assert (other["answer"], other["question"]) == (row["answer"], row["question"])
    pictures = sorted(digest(row["images"][0]) for row in ROWS)
    assert sorted(digest(row["images"][0]) for row in swapped) == pictures, "each image once"
    again = images.variants(ROWS)[images.SWAPPED]
    assert [row["images"] for row in again] == [row["images"] for row in swapped]


def test_without_images_or_with_one_row_there_is_nothing_to_swap():
    texts = [{"prompt": as_text(row["prompt"]), "question": "?", "answer": "1"} for row in ROWS]
    assert images.variants(texts) == images.variants(ROWS[:1]) == images.variants([]) == {}
    assert looking.checks({}) == []


def test_a_model_that_looks_needs_the_images(stage, capsys):
    verdict = judged(stage, half_seen)
    figures = verdict.baseline
    assert figures["pass@1, right images"] == figures["pass@1"] == pytest.approx(0.625, abs=0.1)
    assert figures["pass@1, swapped"] <= 0.3
    assert figures["pass@1, blank"] <= 0.3
    low, high = figures[f"{looking.NEEDED}, interval"]
    assert 0 < low < figures[looking.NEEDED] < high < 1
    [check] = [each for each in verdict.checks if each.name == "images"]
    assert check.state == "ok" and "pass@1 that needs the images " in check.evidence
    assert verdict.passed


def test_a_model_that_answers_without_looking_is_named(stage):
    verdict = judged(stage, blind)
    figures = verdict.baseline
    assert figures["pass@1"] == figures["pass@1, swapped"] == figures["pass@1, blank"] == 0.25
    low, high = figures[f"{looking.NEEDED}, interval"]
    assert low <= 0 <= high
    [check] = [each for each in verdict.checks if each.name == "answers without looking"]
    assert check.state == "warning" and "take a base with better vision" in check.fix
    stored = json.loads((stage.run / "rewards/report.json").read_text())
    assert check._asdict() in stored["checks"]
    assert stored["baseline"]["pass@1, blank, interval"] == figures["pass@1, blank, interval"]
    assert verdict.passed, "a warning: the user decides"
    first, second = str(verdict).splitlines()
    assert first.startswith("PASSED, train") and second.startswith("  answers without looking: pa")


def test_a_model_that_is_never_right_is_not_said_to_guess(stage):
    verdict = judged(stage, lambda image, number: f"no idea {number}")
    assert verdict.baseline["pass@1"] == 0
    assert not [check for check in verdict.checks if check.name == "answers without looking"]


def test_completions_are_sampled_once_and_kept_without_images(stage):
    engine = Looker(half_seen)
    test = reward_lab.open_test(stage, QA, engine)
    assert len(engine.asked) == 16 + 16, "a swapped prompt is another row's: the question is one"
    again = Looker(None)
    other = reward_lab.open_test(stage, QA, again)
    assert again.asked == []
    assert other.baseline.samples_P_G == test.baseline.samples_P_G
    assert other.baseline.unseen == test.baseline.unseen
    stored = pd.read_parquet(stage.run / KEPT_AT)
    assert not stored["prompt"].str.contains("PIL").any()
    assert (stage.run / KEPT_AT).stat().st_size < 50_000
    assert [len(groups) for groups in test.baseline.unseen.values()] == [16, 16]
    assert len(test.baseline.rows) == 16


def test_difficulty_is_measured_for_each_image_though_the_question_is_the_same(stage):
    config = resolve("tiny-cpu", flatten(stage.config), {"data.difficulty_prompts": 32})
    report = json.loads((stage.run / "data/report.json").read_text())

    def easy_if_red(image, number):
        return "red" if seen(image) == "red" else half_seen(image, number)

    report = by_difficulty(Stage(stage.run, "01", config), QA, report, Looker(easy_if_red))
    assert report["difficulty"]["judged"] == 32
    assert "red" not in {row["answer"] for row in data.load(stage.run, "train")}
    assert report["train_rows"] == len(data.load(stage.run, "train")) > 16


# Rewards


@reward()
def sees(response, answer, images):
    """The answer, if the image shows it."""
    return float(f"<answer>{answer}</answer>" in response and seen(images[0]) == answer)


@reward()
def overlooks(response, answer, images):
    """It takes the images, and pays without them."""
    return float(answer in response and len(images) == 1)


def peeks(prompts, completions, **columns):
    """It reads the image from the prompt, and does not say so."""
    colors = [seen(prompt[-1]["content"][0]["image"]) for prompt in prompts]
    texts = [completion[-1]["content"] for completion in completions]
    return [float(color in text) for color, text in zip(colors, texts, strict=True)]


@pytest.mark.parametrize(
    ("func", "rules"),
    [
        (sees, []),
        (overlooks, ["pays the same for other images"]),
        (peeks, ["reads images unnamed"]),
        (QA.reward_funcs[0], []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_references_are_scored_with_other_images(func, rules):
    checks = looking.images(Bench(reward_set([(func, 1.0)])), ROWS)
    names = [check.name for check in checks if "image" in check.name]
    assert names == [f"{func.__name__}: {rule}" for rule in rules]
    if func is overlooks:
        evidence = "for all of 16 references, with swapped and blank images"
        assert evidence in [check.evidence for check in checks]
    assert all(check.state == "warning" and check.fix for check in checks if "image" in check.name)


def test_attacks_get_the_rows_image_though_the_question_is_the_same():
    verdict = check_rewards(sees, ROWS, reference=QA.reference)
    assert verdict.roles == {"sees": "right"}, verdict
    assert verdict.amounts["the right answer"] == 1 > verdict.amounts["another row's answer"]


def test_stage_03_scores_again_with_the_images(stage):
    preset = QA._replace(
        reward_funcs=[*QA.reward_funcs, sees], reward_weights=[*QA.reward_weights, 0.5]
    )
    verdict = judged(stage, half_seen, preset)
    assert verdict.passed, str(verdict)
    stored = (stage.run / "rewards/scores.json").read_text()
    assert "PIL" not in stored and len(stored) < 200_000
    scores = json.loads(stored)["scores"]["sees"]
    assert set(scores) == {0.0, 1.0}
    assert reward_lab.refuse_untested(stage.run, preset) == "the rewards passed their test"
    changed = json.loads(stored) | {"scores": {"sees": [1 - score for score in scores]}}
    (stage.run / "rewards/scores.json").write_text(json.dumps(changed))
    with pytest.raises(ValueError, match="which is not what was tested"):
        reward_lab.refuse_untested(stage.run, preset)


def test_pictures_of_the_tests_differ():
    assert all(one.tobytes() != other.tobytes() for one, other in pairwise(map(picture, COLORS)))
