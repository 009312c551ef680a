"""Whether the base and the rewards need the images, with a model that reads pixels by a script."""

import json

import pytest
from pictures import ROWS, SYSTEM, Looker, blind, half_seen, row_of, seen

from grpo_nb import data, reward_lab, runs
from grpo_nb.data.images import swapped
from grpo_nb.reward_lab import base_model, check_rewards
from grpo_nb.reward_lab.baseline import KEPT_AT
from grpo_nb.reward_lab.difficulty import by_difficulty
from grpo_nb.rewards import load_preset, reward
from grpo_nb.rewards.prompts import as_text
from grpo_nb.runs import Stage
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
    stage = runs.start("01", "seen", SETTINGS | {"data.source": str(source)}, profile="tiny-cpu")
    data.prepare_run(stage.run, stage.config.data, 0, lambda prompts: [10] * len(prompts), QA)
    stage.finish("data")
    return runs.start("02", "seen", REWARDS)


def judged(stage, answer, preset=QA):
    test = reward_lab.open_test(stage, preset, Looker(answer))
    verdict = reward_lab.judge(test)
    reward_lab.save(test, verdict)
    return verdict


def test_every_row_is_shown_the_image_of_another_answer():
    for row, other in zip(ROWS, swapped(ROWS), strict=True):
        assert as_text(row["prompt"]) == as_text(other["prompt"])
        assert other["prompt"][-1]["content"][0]["image"] is other["images"][0]
        assert seen(other["images"][0]) != row["answer"] == other["answer"]
    texts = [{"prompt": as_text(row["prompt"]), "answer": "1"} for row in ROWS]
    assert swapped(texts) == swapped(ROWS[:1]) == swapped([]) == []


LOOKS = {  # an answer, and the check that it leads to
    "half of the time": (half_seen, "images", "ok"),
    "never": (blind, "answers without looking", "warning"),
    "and is never right": (lambda image, number: f"no idea {number}", "images", "ok"),
}


@pytest.mark.parametrize("way", LOOKS)
def test_a_model_that_answers_without_looking_is_named(stage, way):
    answer, name, state = LOOKS[way]
    verdict = judged(stage, answer)
    [check] = [each for each in verdict.checks if "image" in each.evidence]
    assert (check.name, check.state) == (name, state)
    low, high = verdict.baseline[f"{base_model.NEEDED}, interval"]
    assert low <= high and (low > 0) == (answer is half_seen)
    stored = json.loads((stage.run / "rewards/report.json").read_text())
    assert check._asdict() in stored["checks"]
    assert verdict.only_the_base_fails or (
        verdict.passed and (name in str(verdict)) == bool(check.fix)
    )


def test_completions_are_sampled_once_and_kept_without_images(stage):
    engine = Looker(half_seen)
    test = reward_lab.open_test(stage, QA, engine)
    assert len(engine.asked) == 16, "a swapped prompt is another row's: the question is one"
    again = Looker(None)
    other = reward_lab.open_test(stage, QA, again)
    assert again.asked == []
    assert other.baseline == test.baseline
    assert "PIL" not in (stage.run / KEPT_AT).read_text()
    assert (stage.run / KEPT_AT).stat().st_size < 50_000
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
