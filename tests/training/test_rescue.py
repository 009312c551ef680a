"""A base that earns nothing: what helps is measured, cheapest first, and can be adopted."""

import json
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest

from grpo_nb import data, models, reward_lab, rewards, training
from grpo_nb.models.template import count_tokens
from grpo_nb.reward_lab import bench_of
from grpo_nb.runs import Check, Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.runs.files import read_json
from grpo_nb.training import rescue
from grpo_nb.training.pass_rate import PASS
from grpo_nb.training.sft import LOOK_STEPS, PATIENCE, reason_to_end

BACKWARDS = {"data.answer_kind": "text", "train.sft_learning_rate": 3e-3, "data.max_rows": 400}
BACKWARDS["train.max_completion_length"] = 24  # an answer in any form needs 20


def prepared(name, settings):
    """Stage 02 of a run whose data are prepared, with its bench."""
    stage = Stage(Run(name), "02", resolve("tiny-cpu", settings))
    config, chosen = stage.config, rewards.load_rewards(stage.config.rewards)
    tokenizer = models.load_tokenizer(config.model.model_path)
    data.prepare(stage.run, config.data, 0, partial(count_tokens, tokenizer), chosen)
    stage.run.write_config(config)
    return stage, bench_of(config, chosen, tokenizer)


def climb(stage, bench):
    return training.rescue_base(reward_test(stage, bench, data.load(stage.run, "train")))


def test_without_a_rescue_nothing_is_loaded_or_written(runs_dir):
    stage = Stage(Run("unaided"), "02", resolve("tiny-cpu", {"rescue": "none"}))
    result = training.rescue_base(reward_test(stage, SimpleNamespace(environment=None), []))
    assert result.table.empty and not result.settings and not list(runs_dir.iterdir())


def reward_test(stage, bench, rows):
    """A test without baseline rollouts, which the ladder does not read."""
    return reward_lab.RewardTest(stage, rows, None, bench)


@pytest.fixture
def backwards(tmp_path):
    """Rows of a task that the tiny base never solves: to write a number backwards."""
    path = tmp_path / "backwards.jsonl"
    rows = [{"question": f"Write {n} backwards.", "answer": str(n)[::-1]} for n in range(101, 999)]
    path.write_text("\n".join(json.dumps(rows[i * 7 % len(rows)]) for i in range(len(rows))))
    return {**BACKWARDS, "data.source": str(path)}


def test_the_ladder_ends_at_the_form_that_the_base_knows(runs_dir):
    stage, bench = prepared("boxed", {"rewards.form": "boxed", "data.max_rows": 300})
    result = climb(stage, bench)
    assert list(result.table["rung"]) == ["as it is", "the form tags"]
    assert list(result.table["suffices"]) == [False, True]
    assert (result.table["minutes"] > 0).all()
    assert (result.table[PASS] >= result.table["right"]).all()
    settings = json.loads(result.advice.partition("settings = ")[2].partition(" makes ")[0])
    assert settings == result.settings == {"rewards.form": "tags"}
    assert stage.run.config().rewards.form == "boxed", "it is advised, and not adopted"
    assert read_json(stage.run / rescue.REPORT)["rungs"][1]["suffices"]


def test_what_trains_the_base_is_tried_last_and_is_not_trained_twice(runs_dir, backwards):
    stage, bench = prepared("backwards", {**backwards, "rescue": "auto"})
    result = climb(stage, bench)
    *others, last = result.table.to_dict("records")
    assert {"the form boxed", "a worked example", "the shortest rows"} < {o["rung"] for o in others}
    assert not any(other["suffices"] for other in others) and max(o[PASS] for o in others) == 0
    assert last["rung"] == "SFT warm-up on reference answers" and last["suffices"]
    assert result.settings["data.sft_rows"] == 128 and last[PASS] >= 0.3
    adopted = stage.run.config()
    assert adopted.train.sft_until == 0.3 and adopted.sources["train.sft_until"] == "set"
    # Notebook 1 sets the same rows apart; the warm-up of the ladder becomes the run's.
    trained = (stage.run / "rewards/tried_warm_up/adapter_model.safetensors").read_bytes()
    again, _ = prepared("backwards", {**backwards, "rescue": "auto", **result.settings})
    sentence = training.warm_up_base(again)
    assert "ended, as pass@8 reached train.sft_until = 0.3" in sentence
    assert (stage.run / "rewards/warm_up/adapter_model.safetensors").read_bytes() == trained
    shown = {row["question"] for row in data.load(stage.run, "sft")}
    assert not shown & {row["question"] for row in data.load(stage.run, "train")}
    looks = [line for line in training.warm_up_curve(stage.run) if PASS in line]
    assert len(looks) > 1 and all(0 < look["distinct"] <= 1 for look in looks)
    assert all(look["entropy"] > 0 for look in looks)


def test_a_rung_that_fails_is_named_and_costs_nothing_of_what_was_measured(runs_dir, backwards):
    settings = {**backwards, "rescue.teacher": "http://127.0.0.1:9/v1", "train.sft_steps": 0}
    stage, bench = prepared("away", settings)
    rows = data.load(stage.run, "train")[:40]
    # So few rows and steps do not suffice, and the ladder goes on to the teacher, who is away.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rescue, "SFT_STEPS", 2)
        result = training.rescue_base(reward_test(stage, bench, rows))
    assert result.settings == {} and not result.table["suffices"].any()
    last = result.table.iloc[-1]
    assert last["rung"] == "SFT warm-up on a teacher's answers" and pd.isna(last["right"])
    assert "the model at http://127.0.0.1:9/v1 gives no answer" in last["why not"]
    assert result.table["right"].notna().sum() == len(result.table) - 1


def test_nothing_is_advised_where_nothing_helps(runs_dir):
    line = {"right": 0.0, PASS: 0.0, "suffices": False, "settings": {}}
    lines = [{**line, "rung": "as it is"}, {**line, "rung": "other", "settings": {"a": 1}}]
    assert "take easier rows (data.source), a teacher" in rescue.advice(pd.DataFrame(lines))
    lines[1]["right"] = 0.2
    assert "which is not yet enough for GRPO" in rescue.advice(pd.DataFrame(lines))


def test_the_advice_becomes_the_fix_of_the_check():
    stop = Check("base model", "stop", "right in 0 %", "easier rows")
    verdict = reward_lab.Verdict([stop], None, {"pass@1": 0.0}, pd.DataFrame())
    assert verdict.only_the_base_fails
    assert verdict.advised("settings = {}").checks[0].fix == "settings = {}"
    assert verdict.advised("").checks[0].fix == "easier rows"


def looked(*figures, distinct=0.9):
    """Lines of a warm-up with a look each: (pass@8, loss)."""
    return [
        {"step": (n + 1) * LOOK_STEPS, "loss": loss, PASS: rate, "zero-advantage": 0.4}
        | {"distinct": distinct}
        for n, (rate, loss) in enumerate(figures)
    ]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (looked((0.0, 2.0), (0.35, 1.0)), "reached train.sft_until = 0.3"),
        (looked((0.0, 2.0)), ""),
        (looked((0.0, 2.0), (0.1, 0.1), distinct=0.15), "became alike (15% distinct)"),
        (looked(*[(0.1, 1.0)] * (PATIENCE + 1)), "neither pass@8 nor the loss got better"),
        (looked((0.0, 2.0), *[(0.0, 2 * 0.8**n) for n in range(PATIENCE)]), ""),  # the loss falls
        (looked((0.0, 1.0), *[(0.0, 1.0)] * (PATIENCE - 1), (0.1, 1.0)), ""),  # pass@8 rises
    ],
)
def test_a_warm_up_ends_when_grpo_can_go_on_or_nothing_gets_better(lines, reason):
    end = reason_to_end(lines, 0.3)
    assert reason in end and bool(reason) == bool(end)


def test_a_high_pass_rate_does_not_suffice_while_most_groups_have_no_advantage():
    [line] = looked((0.5, 1.0))
    assert not reason_to_end([{**line, "zero-advantage": 0.6}], 0.3)


def test_rescue_is_short_for_its_mode_and_a_key_never_reaches_the_files():
    assert resolve("tiny-cpu", {"rescue": "auto"}).rescue.mode == "auto"
    for address in ("http://user:key@host/v1", "https://host/v1?key=sk-1"):
        with pytest.raises(ValueError, match=r"rescue\.teacher holds a password or key"):
            resolve("tiny-cpu", {"rescue.teacher": address})
    with pytest.raises(ValueError, match=r"train\.sft_answers = 'teacher' with rescue\.teacher"):
        settings = {"train.sft_steps": 3, "data.sft_rows": 8, "train.sft_answers": "teacher"}
        resolve("tiny-cpu", settings)
