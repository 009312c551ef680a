"""The paired evaluation: intervals that cover, verdicts that follow from them, the whole report."""

import json
import math
from statistics import NormalDist
from unittest.mock import patch

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import pytest
from answered import MATH, answers
from conftest import TINY_SETTINGS

import grpo_nb
from grpo_nb import data, evaluation
from grpo_nb.evaluation.report import LEAST_PROMPTS, UNCLEAR, per_prompt
from grpo_nb.rewards import load_preset, reward_set
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve
from grpo_nb.stats import bootstrap, mcnemar
from grpo_nb.views import before_after

DRAWS, FIRST = 1000, MATH.names[0]


def draw_solved(rng, prompts: int, accuracies, samples: int = 1) -> list[np.ndarray]:
    """Pass rates [prompts, draws] of models that find the same prompts hard."""
    shared = rng.normal(size=(prompts, DRAWS))
    limits = [2**0.5 * NormalDist().inv_cdf(accuracy) for accuracy in accuracies]
    noise = [rng.normal(size=(samples, prompts, DRAWS)) for _ in accuracies]
    return [np.mean(shared + own < limit, axis=0) for own, limit in zip(noise, limits, strict=True)]


def coverage(intervals: np.ndarray, truth: float) -> float:
    return float(((intervals[0] <= truth + 1e-9) & (truth - 1e-9 <= intervals[1])).mean())


@pytest.mark.parametrize("prompts", [64, 256, 512])
@pytest.mark.parametrize(
    "accuracies", [(0.3, 0.3), (0.3, 0.9), (0.3, 0.98), (0.9, 0.9), (0.9, 0.98), (0.98, 0.98)]
)
def test_intervals_of_paired_differences_cover_the_truth_as_often_as_they_say(prompts, accuracies):
    before, after = draw_solved(np.random.default_rng(prompts), prompts, accuracies)
    found = bootstrap(after - before, np.outer([-0.5, 0.5], np.ones(DRAWS)))
    covered = coverage(found, accuracies[1] - accuracies[0])
    # Of 64 prompts at 98 % two or three differ: no interval of so few is exact, ours is wider.
    assert 0.93 <= covered <= (0.99 if (prompts, *accuracies) == (64, 0.98, 0.98) else 0.97)


def test_the_bootstrap_pairs_its_columns_and_leaves_nan_out():
    values = np.array([[1.0, 2.0, np.nan, np.nan]] * 5 + [[0.0, 0.0, 3.0, np.nan]] * 5)
    low, high = bootstrap(values, np.full((2, 4), np.nan))
    assert (low[1], high[1]) == (2 * low[0], 2 * high[0])
    assert low[2] == high[2] == 3.0
    assert np.isnan([low[3], high[3]]).all()


@pytest.mark.parametrize(
    ("gained", "lost", "p"),  # 2 P(X <= min) of so many fair coins
    [
        *((5, 0, 2 / 32), (6, 0, 2 / 64), (1, 9, 22 / 1024), (2, 8, 112 / 1024), (4, 4, 1)),
        *((0, 20_000, 0), (2_000, 2_000, 1)),
    ],
)
def test_mcnemar_is_the_exact_binomial(gained, lost, p):
    assert mcnemar(gained, lost) == mcnemar(lost, gained) == pytest.approx(p, rel=1e-12)


def test_figures_of_each_prompt():
    lines = answers("12", ["1222", "-1-2"]).query("decoding == 'sampled'")
    table = per_prompt(lines, MATH)
    assert table["pass@1"].tolist() == table["accuracy"].tolist() == [0.25, 0.25]
    assert table["pass@2"].tolist() == [0.5, 0.5]
    assert table["pass@4"].tolist() == [1.0, 1.0]
    assert table["truncated"].tolist() == [0.0, 0.5]


def report_of(samples, preset=MATH) -> dict:
    about = {"seed": 0, "samples": 1}
    return evaluation.build(evaluation.with_accuracy(samples, preset), preset, about)


def build(before: str, after: str) -> dict:
    """The report on two models; a letter a prompt is what they answered, and "1" is right."""
    texts = {"base": before, "merged": after}
    return report_of({name: answers(text, [2 * x for x in text]) for name, text in texts.items()})


def judged(ends=None, references=None, **models) -> dict:
    """The report on models by one reward, each given as (completions, scores) of the prompts."""
    func = lambda completions, **_: None  # noqa: E731
    func.__name__, samples = FIRST, {}
    if ends:
        func.range = ends
    for label, (completions, scores) in models.items():
        lines = answers([[text] for text in completions]).drop(columns=["accuracy", "correct"])
        own = {"reference": [*(references or "1" * len(completions))] * 2, FIRST: [*scores] * 2}
        samples[label] = lines.assign(**own)
    return report_of(samples, reward_set([(func, 1.0)]))


def paid(texts, scores, ends) -> tuple[dict, dict]:
    """The comparison of two models; a letter a prompt is how often it was solved, of 0 to 3."""
    models = {name: (text, [scores[int(x)] for x in text]) for name, text in
              zip(("base", "merged"), texts, strict=True)}  # fmt: skip
    report = judged(ends, **models)
    return report["comparisons"][0], report["greedy"]


def test_each_level_of_the_rows_has_its_accuracy():
    lines = answers("1122")
    names = ["gcd 1", "gcd 1", "gcd 1", "gcd 2"]
    report = report_of({"a": lines.assign(level=[names[row] for row in lines["row"]])})
    assert report["greedy"]["a"]["level gcd 1"] == pytest.approx(2 / 3)
    assert report["greedy"]["a"]["level gcd 2"] == 0
    assert {"level gcd 1", "level gcd 2"} <= {*evaluation.table(report)}


@pytest.mark.parametrize(
    ("base", "end"),
    [
        (["so it is 7.", "<answer>7</answer>", "6"],
         "; read leniently 66.7 % → 100.0 %: 33.3 of the 66.7 points are format"),
        (["<answer>6</answer>", "<answer>7</answer>", "6"], "; 2 gained, 0 lost"),
    ],
)  # fmt: skip
def test_the_sentence_says_how_much_of_a_gain_is_format(base, end):
    after = (["<answer>7</answer>"] * 3, [1.0] * 3)
    [pair] = judged(references="777", base=(base, [0, 1, 0]), after=after)["comparisons"]
    assert pair["sentence"].endswith(end) and "33.3 % → 100.0 %" in pair["sentence"]


def test_right_answers_that_are_lost_are_no_format():
    after = (["so it is 6.", "<answer>7</answer>", "6"], [0, 1, 0])
    base = (["<answer>8</answer>", "so it is 7.", "7"], [0, 0, 0])
    [pair] = judged(references="777", base=base, after=after)["comparisons"]
    assert pair["sentence"].endswith(": 33.3 of the 33.3 points are format")
    [pair] = judged(references="777", base=base, after=(after[0], [0, 0, 0]))["comparisons"]
    assert pair["sentence"].endswith("leniently 66.7 % → 33.3 %")


@pytest.mark.parametrize(
    ("after", "gained", "state", "end"),
    [
        ("1" * 10, 6, "warning", "; 100 % of the answers of tuned are '1', and the commonest "
         "reference answer is 30 % of all"),
        # it favours the usual answer, and solves others too
        ("1112345111", 14, "ok", "; 14 gained, 0 lost"),
    ],
)  # fmt: skip
def test_a_model_that_gives_every_prompt_the_same_answer_is_named(after, gained, state, end):
    """Its gain is the share of the rows whose answer that is."""
    references = "1112345678" * 2
    texts = {"base": "9" * 20, "tuned": after * 2}
    pairs = {name: zip(text, references, strict=True) for name, text in texts.items()}
    models = {name: (texts[name], [float(x == y) for x, y in pairs[name]]) for name in texts}
    report = judged(references=references, **models)
    [pair] = report["comparisons"]
    assert (pair["verdict"], pair["gained"]) == ("better", gained)
    assert pair["one_answer"] == (state == "warning") and pair["sentence"].endswith(end)
    assert evaluation.checks(report)[1].state == state


def test_the_report_says_better_worse_or_neither():
    pairs = [("1" * 40, "2" * 30 + "1" * 10), ("2" * 9 + "1", "1" * 9 + "2"), ("12" * 8, "12" * 8)]
    worse, better, same = (build(*texts)["comparisons"][0] for texts in pairs)
    assert (worse["verdict"], worse["gained"], worse["lost"]) == ("worse", 0, 30)
    assert better["sentence"].startswith(
        "base → merged: better: greedy accuracy 10.0 % → 90.0 %, +80.0 points (95 % interval +"
    )
    assert "McNemar p = 0.021; 9 gained, 1 lost" in better["sentence"]
    assert same["verdict"] == UNCLEAR and not better["graded"]
    low, high = same["differences"]["accuracy"]["interval"]
    assert low < 0 < high, "equal answers on few prompts do not prove equality"
    low, high = build("1" * 40, "2" * 40)["greedy"]["base"]["intervals"]["accuracy"]
    assert 0.9 < low < high == 1, "nor do 40 right answers prove that all would be"


PARTLY = ("1" * 40, "2" * 32 + "3" * 8)
TWICE = ("3" * 10 + "0" * 38, "3" * 15 + "0" * 33)  # of 48, 5 gained and none lost


@pytest.mark.parametrize(
    ("scores", "ends"),
    [([0, 0, 0, 1], None), ([0, 0, 0, 2], None), ([-5, 0, 0, 7], (-math.inf, math.inf))],
)
def test_a_reward_that_takes_two_values_is_right_or_wrong_whatever_it_pays(scores, ends):
    pair, figures = paid(TWICE, scores, ends)
    assert pair["sentence"].startswith(
        f"base → merged: {UNCLEAR}: greedy accuracy 20.8 % → 31.2 %, +10.4 points"
    )
    assert "McNemar p = 0.062; 5 gained, 0 lost" in pair["sentence"]
    assert figures["merged"]["accuracy"] == figures["merged"]["pass@1"] == 15 / 48


NO_GAIN = "McNemar p = 1.000; 0 gained"


@pytest.mark.parametrize(
    ("texts", "scores", "ends", "word", "figures"),
    [
        (("3" * 10 + "0" * 30, "3" * 10 + "2" * 29 + "1"), [0, 0.3, 0.6, 1], (0, 1), "better",
         ("25.0 % → 69.2 %, +44.2 points", f"25.0 % → 25.0 %, {NO_GAIN}")),
        (PARTLY, [0, 1, 2, 4], (-4, 4), "better",
         ("62.5 % → 80.0 %, +17.5 points", "0.0 % → 20.0 %, McNemar p = 0.008; 8 gained")),
        (PARTLY, [0, 1, 2, 4], (0, math.inf), "better",  # of the best seen
         ("25.0 % → 60.0 %, +35.0 points", "0.0 % → 20.0 %, McNemar p = 0.008; 8 gained")),
        (("0" * 20, "2" * 20), [0, 0, 0.5, 1], (0, 1), "better",
         ("0.0 % → 50.0 %, +50.0 points", f"0.0 % → 0.0 %, {NO_GAIN}")),
        (("02" * 20, "02" * 17 + "222222"), [0, 0, 0.5, 1], (0, 1), UNCLEAR,
         ("25.0 % → 28.7 %, +3.8 points", f"0.0 % → 0.0 %, {NO_GAIN}")),
        (("0" * (LEAST_PROMPTS - 1), "2" * (LEAST_PROMPTS - 1)), [0, 0, 0.5, 1], (0, 1), UNCLEAR,
         ("0.0 % → 50.0 %, +50.0 points", f"0.0 % → 0.0 %, {NO_GAIN}")),
    ],
)  # fmt: skip
def test_partial_credit_is_a_share_of_the_range_and_judged_by_the_interval(
    texts, scores, ends, word, figures
):
    pair, _ = paid(texts, scores, ends)
    assert (pair["verdict"], pair["graded"]) == (word, True)
    assert f"greedy mean score {figures[0]} (95 %" in pair["sentence"]
    assert f"wholly right {figures[1]}" in pair["sentence"]


@patch("grpo_nb.stats.RESAMPLES", 200)
@hypothesis.settings(max_examples=60)
@hypothesis.given(
    answered=st.lists(st.tuples(*[st.sampled_from("0123")] * 2), min_size=1, max_size=60),
    scores=st.sampled_from([[0, 0.3, 0.55, 1], [0, 0, 0, 1], [0.1, 0.1, 0.7, 0.7]]),
    slope=st.floats(1e-3, 1e3),
    shift=st.floats(-1e3, 1e3),
    rng=st.randoms(use_true_random=False),
)
def test_the_verdict_depends_neither_on_the_scale_of_a_reward_nor_on_the_order_of_prompts(
    answered, scores, slope, shift, rng
):
    first, _ = paid(zip(*answered, strict=True), scores, (0, 1))
    rng.shuffle(answered)
    scaled = [slope * score + shift for score in scores]
    other, figures = paid(zip(*answered, strict=True), scaled, (shift, slope + shift))
    assert other["sentence"] == first["sentence"] and other["verdict"] == first["verdict"]
    for name in ("differences", "mcnemar_p", "gained", "lost", "solved", "graded"):
        assert other[name] == first[name], name
    assert all(0 <= each["accuracy"] <= 1 for each in figures.values())


def test_the_checks_say_whether_the_comparison_holds_and_the_model_is_better():
    def states(before, after, **change):
        report = build(before, after)
        report["comparisons"][0].update(change)
        return [check.state for check in evaluation.checks(report)]

    assert states("2" * 9 + "1", "1" * 9 + "2") == ["ok", "ok"]
    assert states("1" * 40, "2" * 40) == states("12" * 8, "12" * 8) == ["ok", "stop"]
    assert states("2" * 5, "1" * 5) == ["stop", "stop"]
    graded = {"verdict": "better", "graded": True}
    assert states("12" * 8, "12" * 8, **graded) == ["ok", "warning"]
    nothing = {"differences": {"accuracy": {"interval": None}}}
    assert states("2" * 9, "1" * 9, **nothing)[0] == "stop"


def test_a_reward_that_gives_none_and_a_set_without_format_leave_valid_json():
    preset = load_preset("summarization")
    lines = answers("1212121", ["1", "2"] * 3 + ["1"])
    lines[preset.names] = 0.5
    lines[[preset.names[0], "format"]] = np.nan
    report = report_of({"a": lines, "b": lines}, preset)
    json.dumps(report, allow_nan=False)
    assert report["greedy"]["a"]["format"] is None
    assert report["greedy"]["a"]["intervals"]["accuracy"] is None
    assert "could be scored" in report["comparisons"][0]["sentence"]
    assert "none" in set(evaluation.table(report)["95 %"])


def test_one_model_alone_has_figures_and_a_picture(runs_dir):
    report = report_of({"a": answers("1212")}) | {"models": {"a": {}}}
    assert report["comparisons"] == []
    before_after(Run("p"), report)
    assert (runs_dir / "p/figures/before_after.png").stat().st_size > 5000


def test_what_got_worse_is_shown_first():
    base, merged = answers("1212", list("1212")), answers("1122", list("1122"))
    table = evaluation.before_after({"base": base, "merged": merged}, count=2)
    assert table["question"].tolist() == ["q2", "q1"]
    assert table["correct"].tolist() == ["yes → no", "no → yes"]


def test_the_same_model_under_two_names_answers_the_same(demo_run):
    config = resolve("tiny-cpu", {"evaluate.samples": 2, "evaluate.eval_batch_size": 3})
    path, rows, told = demo_run / "model/merged", data.load(demo_run, "eval", 7), []
    named = dict.fromkeys(("one", "two"), path)
    found = grpo_nb.evaluate(
        named, rows, **evaluation.options(config), progress=lambda *state: told.append(state)
    )
    one, two = found.samples.values()
    pd.testing.assert_frame_equal(one, two)
    assert one.groupby("decoding").size().to_dict() == {"greedy": 7, "sampled": 14}
    done = [line[0] for line in told]
    assert done == sorted(done) and done[-1] == 42 and {line[1] for line in told} == {42}
    assert told[-1][2].startswith("two, ") and told[-1][2].endswith(" tokens/s")
    assert {line["verdict"] for line in found.report["comparisons"]} == {UNCLEAR}


def test_the_report_of_a_run_is_complete(demo_run):
    report = json.loads((demo_run / "eval/report.json").read_text())
    samples = pd.read_parquet(demo_run / "eval/samples.parquet")
    assert report["prompts"] == TINY_SETTINGS["data.eval_rows"]
    assert list(report["models"]) == ["base", "merged"], "the adapter answers as the merged model"
    for (decoding, name), lines in samples.groupby(["decoding", "model"]):
        figures = report[decoding][name]
        mean = lines["numeric_correctness_reward"].mean()
        assert figures["accuracy"] == figures["pass@1"] == pytest.approx(mean)
        low, high = figures["intervals"]["accuracy"]
        assert low <= mean <= high
    assert report["sampled"]["base"]["pass@4"] >= report["sampled"]["base"]["pass@2"]
