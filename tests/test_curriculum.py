"""The difficulty filter, with the real base model."""

from functools import partial

import pandas as pd
import pytest

from grpo_nb import data, models, runs
from grpo_nb.models import chat
from grpo_nb.reward_lab import curriculum, pilot
from grpo_nb.rewards import load_preset

MATH = load_preset("math")


@pytest.fixture
def prepare(runs_dir):
    """A stage 01 with prepared rows, and their report."""

    def start(**settings):
        named = {f"data.{name}": value for name, value in settings.items()}
        small = {"data.max_rows": 80, "data.eval_rows": 40}
        stage = runs.start_stage("01", "d", small | named, profile="tiny-cpu")
        tokenizer = chat.load_tokenizer(stage.config.model.model_path)
        count_tokens = partial(chat.count_tokens, tokenizer)
        return stage, data.prepare(stage.run, stage.config.data, 0, count_tokens)

    return start


def test_prompts_that_teach_nothing_are_dropped_and_the_pilot_serves_notebook_2(
    prepare, monkeypatch
):
    stage, report = prepare(difficulty_prompts=12, order="easy_to_hard")
    before = data.load(stage.run, "train")
    report = curriculum.by_difficulty(stage, MATH, report)
    after = data.load(stage.run, "train")
    found = report["difficulty"]
    assert found["judged"] == 12
    assert len(after) == report["train_rows"] == 40 - found["too_hard"] - found["too_easy"] < 40
    assert all(row in before for row in after)
    monkeypatch.setattr(models, "load_checkpoint", None)  # nothing is sampled again
    judged = [row for row in before[:12] if row in after]
    assert len(pilot.sample(stage.run, judged, stage.config).rows) == len(judged) > 0


def test_easy_prompts_come_first(prepare):
    stage, report = prepare(difficulty_prompts=12, order="easy_to_hard")
    before = {row["question"]: row for row in data.load(stage.run, "train")}
    curriculum.by_difficulty(stage, MATH, report)
    after = data.load(stage.run, "train")
    judged = [row for row in after if row in list(before.values())[:12]]
    tried = pilot.sample(stage.run, judged, stage.config)
    texts = [[s.text for s in group] for group in tried.samples_P_G]
    rates = pd.Series(
        [
            sum(MATH.reward_funcs[0](completions=group, answer=[row["answer"]] * len(group)))
            for row, group in zip(judged, texts, strict=True)
        ]
    )
    assert rates.is_monotonic_decreasing
    assert rates.between(1, 7).all(), "always and never solved ones are gone"


def test_without_a_pilot_nothing_changes(prepare):
    stage, report = prepare()
    before = data.load(stage.run, "train")
    assert curriculum.by_difficulty(stage, MATH, report) is report
    assert data.load(stage.run, "train") == before


def test_an_empty_band_is_refused(prepare):
    stage, report = prepare(difficulty_prompts=40, min_pass_rate=0.99, max_pass_rate=0.995)
    with pytest.raises(ValueError, match=r"no prompt has a pass rate between 0\.99 and 0\.995"):
        curriculum.by_difficulty(stage, MATH, report)


RATES = {"Question 0?": 0.0, "Question 1?": 0.25, "Question 2?": 1.0, "Question 3?": 0.75}


def test_prompts_always_or_never_solved_are_dropped_and_easy_ones_come_first():
    rows = [{"question": f"Question {i}?"} for i in range(5)]
    kept, report = curriculum.keep_band(rows, RATES)
    assert kept == [rows[1], rows[3], rows[4]], "what was not sampled is kept"
    assert report == {"rows": 5, "too_hard": 1, "too_easy": 1, "kept": 3}
    with pytest.raises(ValueError, match="1 are too hard, 0 too easy"):
        curriculum.keep_band(rows[:1], RATES)
    ordered = curriculum.easy_to_hard(rows, RATES)
    assert [rows.index(row) for row in ordered] == [2, 3, 4, 1, 0]
