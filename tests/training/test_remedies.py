"""A base that earns nothing: what helps is measured, and named by the settings that adopt it."""

import json
from functools import partial

import pandas as pd
import pytest

from grpo_nb import data, models, reward_lab, rewards, training
from grpo_nb.models.template import count_tokens
from grpo_nb.reward_lab import bench_of
from grpo_nb.runs import Check, Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.runs.files import read_json


@pytest.fixture(scope="module")
def tried(tmp_path_factory):
    """The tiny base is asked for a form that it was never taught."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(tmp_path_factory.mktemp("runs")))
        settings = {"rewards.form": "boxed", "data.max_rows": 300, "train.sft_learning_rate": 3e-3}
        stage = Stage(Run("here"), "02", resolve("tiny-cpu", settings))
        config, chosen = stage.config, rewards.load_rewards(stage.config.rewards)
        tokenizer = models.load_tokenizer(config.model.model_path)
        data.prepare(stage.run, config.data, 0, partial(count_tokens, tokenizer), chosen)
        rows = data.load(stage.run, "train")
        yield training.try_remedies(stage, bench_of(stage.config, chosen, tokenizer), rows)


def test_each_remedy_is_measured_on_the_same_prompts(tried):
    names = set(tried["remedy"])
    warm = tried[tried["remedy"] == "12 SFT warm-up steps"].iloc[0]
    assert warm["settings"] == {"train.sft_steps": 12, "data.sft_rows": 64}
    assert {"as it is", "the form tags", "a worked example", "temperature 0.7"} < names
    assert tried["right"].between(0, 1).all() and (tried["seconds"] > 0).all()
    assert (tried["pass@4"] >= tried["right"]).all()


def test_the_form_that_the_base_knows_is_what_helps_and_can_be_adopted(tried):
    assert tried.iloc[0]["remedy"] == "the form tags"
    base = tried[tried["remedy"] == "as it is"].iloc[0]
    assert base["right"] < 0.05 < 0.3 < tried.iloc[0]["right"]
    line = training.advice(tried)
    settings = json.loads(line.partition("settings = ")[2].partition(" makes ")[0])
    assert resolve("tiny-cpu", settings).rewards.form == "tags"


def test_nothing_is_advised_where_nothing_helps(tried):
    same = tried.assign(right=0.0)
    assert training.advice(same) == training.advice(pd.DataFrame()) == ""


def test_the_advice_becomes_the_fix_of_the_check():
    stop = Check("base model", "stop", "right in 0 %", "easier rows")
    verdict = reward_lab.Verdict([stop], None, {"pass@1": 0.0}, pd.DataFrame())
    assert verdict.only_the_base_fails
    assert verdict.advised("settings = {}").checks[0].fix == "settings = {}"
    assert verdict.advised("").checks[0].fix == "easier rows"


def test_a_run_with_a_warm_up_is_tried_as_it_is_after_it(runs_dir):
    settings = {"data.max_rows": 120, "data.sft_rows": 8, "train.sft_steps": 1}
    stage = Stage(Run("warmed"), "02", resolve("tiny-cpu", settings))
    config, chosen = stage.config, rewards.load_rewards(stage.config.rewards)
    tokenizer = models.load_tokenizer(config.model.model_path)
    data.prepare(stage.run, config.data, 0, partial(count_tokens, tokenizer), chosen)
    bench = bench_of(config, chosen, tokenizer)
    lines = training.try_remedies(stage, bench, data.load(stage.run, "train"))
    assert (stage.run / "rewards/warm_up/adapter_model.safetensors").is_file()
    more = lines[lines["remedy"] == "12 more SFT warm-up steps"].iloc[0]
    assert more["settings"] == {"train.sft_steps": 13}, "the rows are the run's own"
    state = read_json(stage.run / "progress.json")
    assert state["done"] == state["total"] == 64 * len(lines)
