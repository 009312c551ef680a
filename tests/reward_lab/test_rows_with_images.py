"""Rows with images, with a model that reads pixels by a script."""

import pytest
from pictures import ROWS, SYSTEM, Looker, half_seen, row_of, seen
from prepared import write_jsonl

from grpo_nb import data, reward_lab, runs
from grpo_nb.reward_lab import check_rewards
from grpo_nb.reward_lab.baseline import KEPT_AT
from grpo_nb.rewards import load_preset, reward

QA = load_preset("qa")
SETTINGS = {"data.answer_kind": "text", "data.system_prompt": SYSTEM, "data.eval_rows": 8}
REWARDS = {"rewards.preset": "qa", "rewards.baseline_completions": 4}
REWARDS |= {"rewards.baseline_prompts": 16}


@pytest.fixture
def stage(runs_dir):
    """Stage 02 of a run with 40 pictures."""
    lines = []
    for number, row in enumerate(map(row_of, range(40))):
        row["images"][0].save(runs_dir / f"{number}.png")
        lines.append({name: row[name] for name in ("question", "answer")})
        lines[-1]["image"] = f"{number}.png"
    source = write_jsonl(runs_dir / "rows.jsonl", *lines)
    stage = runs.start("01", "seen", SETTINGS | {"data.source": source}, profile="tiny-cpu")
    data.prepare_run(stage.run, stage.config.data, 0, lambda prompts: [10] * len(prompts), QA)
    stage.finish("data")
    return runs.start("02", "seen", REWARDS)


def test_completions_are_sampled_once_and_kept_without_images(stage):
    engine = Looker(half_seen)
    test = reward_lab.open_test(stage, QA, engine)
    assert len(engine.asked) == 16, "the question is one, the images are not"
    again = Looker(None)
    other = reward_lab.open_test(stage, QA, again)
    assert again.asked == []
    assert other.baseline == test.baseline
    assert "PIL" not in (stage.run / KEPT_AT).read_text()
    assert (stage.run / KEPT_AT).stat().st_size < 50_000
    assert len(test.baseline.rows) == 16


# Rewards


@reward()
def sees(response, answer, images):
    """The answer, if the image shows it."""
    return float(f"<answer>{answer}</answer>" in response and seen(images[0]) == answer)


def test_attacks_get_the_rows_image_though_the_question_is_the_same():
    verdict = check_rewards(sees, ROWS, reference=QA.reference)
    assert verdict.roles == {"sees": "right"}, verdict
    assert verdict.amounts["the right answer"] == 1 > verdict.amounts["another row's answer"]
