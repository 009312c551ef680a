import numpy as np
import pandas as pd
import pytest
from answered import MATH, answers
from PIL import Image

from grpo_nb import evaluation
from grpo_nb.__main__ import main
from grpo_nb.data.rows import pack, write_rows
from grpo_nb.files import append_line, write_json
from grpo_nb.pipeline import leaderboard
from grpo_nb.rewards.prompts import build_prompt
from grpo_nb.runs import NOTEBOOKS, Run, config


def make_run(name, right, questions=None, **settings):
    """A run whose merged model answers these prompts right, and its base none."""
    run, text = Run(name), "".join("1" if one else "2" for one in right)
    chosen = config.resolve("tiny-cpu", {k.replace("__", "."): v for k, v in settings.items()})
    said = {"base": "2" * len(text), "merged": text}
    samples = {label: answers(one, questions=questions) for label, one in said.items()}
    report = {"models": {"base": {}, "merged": {}}}
    report |= evaluation.build(samples, MATH, {"seed": 0})
    evaluation.save(run, evaluation.Evaluation(samples, report))
    run.write_config(chosen)
    done = {stage: {"status": "done", "seconds": 90.0} for stage in NOTEBOOKS}
    write_json(run / "manifest.json", done)
    append_line(run / "train/metrics.jsonl", {"step": 1, "reward": 1.0})
    (run / "data").mkdir()
    samples["base"][["question"]][: len(text)].to_parquet(run / "data/eval.parquet")
    return run.path


def right(count, of=100):
    return np.arange(of) < count


def test_the_best_comes_first_and_only_real_differences_are_called_so(runs_dir):
    places = [make_run("weak", right(50)), make_run("good", right(92)), make_run("best", right(95))]
    board = leaderboard.compare(places)
    assert list(board.table["run"]) == ["best", "good", "weak"]
    of_best = board.pairs[board.pairs["better"] == "best"]
    assert list(of_best["verdict"]) == ["not distinguishable", "real"]
    assert list(of_best["difference"]) == [pytest.approx(0.03), pytest.approx(0.45)]
    weak = of_best.iloc[1]
    assert 0 < weak["low"] < 0.45 < weak["high"]
    verdicts = board.pairs.set_index(["better", "worse"])["verdict"]
    assert verdicts["good", "weak"] == "real"


def test_many_comparisons_are_corrected_for(runs_dir):
    """One pair with 8 prompts to 1 is real alone (p = 0.04), and not among many."""
    alone = [make_run("a0", right(92)), make_run("b", np.r_[right(84, 92), np.arange(8) == 0])]
    assert list(leaderboard.compare(alone).pairs["verdict"]) == ["real"]
    more = [make_run(f"a{i}", right(92)) for i in range(1, 5)]
    board = leaderboard.compare([*alone, *more])
    assert board.pairs["p"].min() < 0.05
    assert set(board.pairs["verdict"]) == {"not distinguishable"}


def test_only_shared_prompts_are_paired(runs_dir):
    a = make_run("a", right(90), [f"q{i}" for i in range(100)])
    b = make_run("b", right(10), [f"q{i}" for i in range(60, 160)])
    c = make_run("c", right(10), [f"other {i}" for i in range(100)])
    board = leaderboard.compare([a, b, c])
    pairs = board.pairs.set_index(["better", "worse"])
    # of q60 … q99 run a has the first 30 right, run b the first 10
    assert pairs.loc[("a", "b"), ["prompts", "difference"]].tolist() == [40, 0.5]
    assert pairs.loc[("a", "c"), "prompts"] == 0
    assert pairs.loc[("a", "c"), "verdict"] == "not distinguishable"
    assert np.isnan(pairs.loc[("a", "c"), "difference"])


def test_the_same_question_about_other_images_is_another_prompt(runs_dir):
    """Ten pictures, one question and answer: each run is right about five of them."""
    first, second = np.arange(10) < 5, np.arange(10) >= 5
    places = [make_run("a", first, ["?"] * 10), make_run("b", second, ["?"] * 10)]
    for place in places:
        pictures = [Image.new("L", (8, 8), shade) for shade in range(0, 250, 25)]
        rows = [
            {"prompt": build_prompt("?"), "question": "?", "answer": "1", "prompt_tokens": 1}
            | {"images": [picture]}
            for picture in pictures
        ]
        write_rows(place / "data/eval.parquet", list(map(pack, rows)), rows[0])
    board = leaderboard.compare(places)
    assert board.pairs.loc[0, ["prompts", "difference", "p"]].tolist() == [10, 0, 1]
    assert board.pairs.loc[0, "low"] < 0 < board.pairs.loc[0, "high"]


def test_equal_settings_are_summed_up_over_seeds(runs_dir):
    places = [
        make_run(f"r{beta}{seed}", right(50 + beta + 10 * seed), grpo__beta=float(beta), seed=seed)
        for beta in (0, 1)
        for seed in (0, 1, 2)
    ]
    found = leaderboard.compare(places).settings
    assert found.to_dict("records") == [
        {"grpo.beta": "1.0", "mean": 0.61, "min": 0.51, "max": 0.71, "runs": 3},
        {"grpo.beta": "0.0", "mean": 0.6, "min": 0.5, "max": 0.7, "runs": 3},
    ]


def test_the_command_writes_the_table_and_says_what_is_left_out(runs_dir, capsys):
    make_run("a", right(90), grpo__beta=0.5)
    make_run("b", right(40))
    Run("broken").record("01", {"status": "failed", "error": "ValueError: <no>"})
    folders, table = sorted(str(path) for path in runs_dir.iterdir()), runs_dir / "t.csv"
    assert main(["report", *folders, "--csv", str(table)]) == 0
    printed = capsys.readouterr().out
    assert "1 of 1 differences are real" in printed and "ValueError: <no>" in printed
    found = pd.read_csv(table)
    assert list(found["seconds"]) == [360, 360] and list(found["grpo.beta"]) == [0.5, 0.0]
    assert main(["report", str(runs_dir / "broken")]) == 2
    error = capsys.readouterr().err
    assert "no finished run among 1 folders" in error
    assert "broken: 01_prepare_data of 'broken' is failed: ValueError: <no>" in error
    with pytest.raises(ValueError, match="sweep notebooks/compare"):
        leaderboard.compare(leaderboard.named("compare"))
