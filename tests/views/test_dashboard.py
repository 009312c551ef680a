"""The live dashboard without a browser: what it sends; and the charts of a run."""

import json
import math

import numpy as np
import pytest

from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.runs import Run
from grpo_nb.training import Update, health
from grpo_nb.views import charts, dashboard, training_charts
from grpo_nb.views.dashboard import MOST, TrainingDashboard

HEALTHY = (PROJECT_ROOT / "tests/healthy_metrics.jsonl").read_text(encoding="utf-8")
LINES = [json.loads(line) for line in HEALTHY.splitlines()]
SCORES = {"exact_reward": 1.0, "reward": 1.0, "advantage": 0.5}


def update(line, completions=(), alerts=()):
    return Update(line, 100, completions, alerts)


def fed(*updates):
    """A dashboard that was told all of these, and whose cell has ended."""
    dashboard = TrainingDashboard()
    dashboard.begin([], 100, eval_rows=64)
    for one in updates:
        dashboard(one)
    dashboard.rest()
    assert dashboard.error == ""
    return dashboard


def curve(dashboard, key):
    place = dashboard.names.index(key)
    return [row[place] if place < len(row) else None for row in json.loads(dashboard.rows)]


def drawn(lines, title):
    """The curve of a chart, [points]; a NaN is a gap."""
    (axis,) = [a for a in charts.draw(lines).axes if a.get_title(loc="left") == title]
    return axis.get_lines()[0].get_ydata()


def completion(text, reward, **more):
    return {"question": "q", "completion": text, **SCORES, "reward": reward, **more}


def test_every_step_reaches_the_browser():
    dashboard = fed(*map(update, LINES))
    assert len(LINES) == 60 and curve(dashboard, "step") == [line["step"] for line in LINES]
    assert curve(dashboard, "reward") == pytest.approx([line["reward"] for line in LINES], rel=1e-4)
    pace = sum(line["step_time"] for line in LINES[-20:]) / 20
    assert dashboard.now["pace"] == f"{pace:.3g} s per step"
    assert dashboard.now["phase"] == "ended after step 60" and dashboard.now["over"]
    assert fed(update({"step": 100, "reward": 0.5})).now["phase"] == "finished after step 100"


def validated(*rates):
    return [{"step": 25 * n, "eval/accuracy": rate} for n, rate in enumerate(rates)]


SENTENCES = {  # of validations: gravity and a part of the sentence
    (0.6, 1.0, 1.0): ("good", "solved: the validation is at 100% since step 25"),
    (0.6, 0.85): ("good", "it learns: validation 60% before training, 85% at step 25"),
    (0.6, 0.3): ("warning", "it gets worse"),
    (0.6, 0.62): ("", "too early to tell"),
    (1.0,): ("", "too early to tell"),  # the base: nothing is trained
}


@pytest.mark.parametrize(("rates", "expected"), SENTENCES.items())
def test_one_sentence_says_where_the_validation_stands(rates, expected):
    lines = validated(*rates)
    base = dashboard.before_training(lines, 64)
    gravity, text = dashboard.sentence(lines, [], base, 100)
    assert (gravity, expected[1] in text) == (expected[0], True), text


def test_the_sentence_names_what_stops_first_and_then_the_rewards():
    watch = health.Watch(health.Expected({"exact": (1.0, 0.0, 1.0)}))
    nan = watch.alert("not a number", "loss", "loss is nan", 4)
    spike = watch.alert("spike", "kl", "2.1", 9)
    alerts = fed(update(LINES[3], alerts=[nan]), update(LINES[8], alerts=[spike])).alerts
    gravity, text = dashboard.sentence(validated(0.5, 1.0), alerts, [], 60)
    begins = "not a number, step 4: loss is NaN or infinite (loss is nan) → repair a reward"
    assert gravity == "stop" and text.startswith(begins), "the step once, and no others' rates"
    assert dashboard.sentence(LINES, alerts[1:], [], 60) == ("warning", alerts[1]["text"])
    lines = [{"step": n, "reward": n > 9, "rewards/right/mean": 0.25} for n in range(60)]
    for count in (30, 60):  # what was at first stays the same
        assert dashboard.sentence(lines[:count], [], [], 60, "right") == (
            "",
            "the reward 0 → 1, `right` 0.25 → 0.25 (means of the first and the last 10 steps)",
        )


def test_the_base_has_an_interval_where_the_number_of_prompts_is_known():
    [rate, low, high] = dashboard.before_training(validated(0.5), 64)
    assert rate == 0.5 and 0.37 < low < 0.4 and 0.6 < high < 0.63
    assert dashboard.before_training(validated(0.5), 0) == [0.5]
    assert dashboard.before_training([{"step": 0, "eval/reward": 1.4}], 64) == [1.4]
    assert dashboard.before_training(LINES, 64) == []


def test_the_group_with_the_widest_totals_is_shown_best_first_and_bounded():
    dull = [completion("x", 1.0, question="all alike")] * 3
    scores = {"exact_reward": math.nan, "note": "no score"}
    wide = [completion("a" * 9000, n / 16, **scores) for n in range(17)]
    group = dashboard.one_group(3, [*dull, *wide])
    assert (group["step"], group["question"], group["count"]) == (3, "q", 17)
    totals = [one["total"] for one in group["completions"]]
    assert len(totals) == dashboard.SHOWN and (totals[0], totals[-1]) == (1.0, 0.0)
    assert group["completions"][0]["scores"] == {"exact_reward": None}
    assert len(group["completions"][0]["text"]) == dashboard.CHARACTERS


def test_groups_are_thinned_and_the_newest_stays():
    steps = range(1, 4 * MOST["groups"])
    board = fed(*(update(LINES[0] | {"step": n}, [completion("a", 1.0)]) for n in steps))
    shown = [group["step"] for group in json.loads(board.groups)]
    assert len(shown) <= MOST["groups"] and shown[0] == 1 and shown[-1] == steps[-1]
    assert shown == sorted(set(shown))


def test_where_steps_are_fast_only_some_are_sent_at_once(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("grpo_nb.views.dashboard.time.monotonic", lambda: clock[0])
    dashboard, times = TrainingDashboard(), []
    dashboard.observe(lambda _: times.append(clock[0]), "now")
    for step in range(1, 100):
        clock[0] += 0.125
        dashboard(update({"step": step, "reward": 0.5}))
    assert len(times) == 12
    dashboard(update({"step": 100, "reward": 0.5}))
    assert dashboard.now["step"] == 100 and len(json.loads(dashboard.rows)) == 100


def test_an_error_is_shown_and_the_training_goes_on():
    dashboard = TrainingDashboard()
    dashboard(update(LINES[0], ["no dict"]))
    assert dashboard.error.startswith("TypeError") and "Traceback" in dashboard.error
    dashboard(update(LINES[1]))
    dashboard.rest()
    assert dashboard.now["step"] == 2


@pytest.mark.parametrize("lost", [math.inf, None, "text"])
def test_a_metric_that_is_no_number_leaves_a_gap(lost):
    lines = [{"step": step, "reward": 1.0, "kl": 0.5} for step in range(1, 8)]
    lines[3] |= {"kl": lost}
    assert np.isnan(drawn(lines, "reward, weighted total")).sum() == 0
    gaps = [False, False, False, True, False, False, False]
    assert list(np.isnan(drawn(lines, "KL to the base [nats]"))) == gaps
    assert [value is None for value in curve(fed(*map(update, lines)), "kl")] == gaps


def test_the_picture_of_a_run_is_saved(runs_dir):
    held_out = [{"step": step, "eval/accuracy": 0.5, "eval/format": 0.9} for step in (20, 40)]
    lines = [*LINES[:30], LINES[30] | {"entropy": None}, *held_out, *LINES[31:]]
    picture = training_charts(Run("x"), lines)
    titles = [axis.get_title(loc="left") for axis in picture.axes if axis.axison]
    assert titles[:4] == ["reward, weighted total", "exact match", "fuzzy match", "soft format"]
    assert titles[-1] == "step time [s]" and "KL to the base [nats]" not in titles
    points = picture.axes[titles.index("validation")].get_lines()
    assert [list(line.get_xdata()) for line in points] == [[20, 40], [20, 40]]
    assert (Run("x") / "figures/training.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="train first"):
        training_charts(Run("x"), [])
