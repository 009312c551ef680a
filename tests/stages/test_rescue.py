"""A base that earns nothing: what helps is measured, and advised."""

import json
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest

from grpo_nb import data, models, reward_lab, rewards, stages
from grpo_nb.checks import Check
from grpo_nb.models.template import count_tokens
from grpo_nb.reward_lab import bench_of
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve
from grpo_nb.stages import rescue
from grpo_nb.stages.pass_rate import PASS
from grpo_nb.stages.sft import LOOK_STEPS, PATIENCE, reason_to_end

BACKWARDS = {"data.answer_kind": "text", "train.sft_learning_rate": 3e-3, "data.max_rows": 400}
BACKWARDS["grpo.max_completion_length"] = 24  # an answer in any form needs 20


def prepared(name, settings):
    """Stage 02 of a run whose data are prepared, with its bench."""
    stage = Stage(Run(name), "02", resolve("tiny-cpu", settings))
    config, chosen = stage.config, rewards.load_rewards(stage.config.rewards)
    tokenizer = models.load_tokenizer(config.model.model_name)
    data.prepare_run(stage.run, config.data, 0, partial(count_tokens, tokenizer), chosen)
    stage.run.write_config(config)
    return stage, bench_of(config, chosen, tokenizer)


def rescued(stage, bench):
    """Without baseline rollouts, which are not read."""
    test = reward_lab.RewardTest(stage, data.load(stage.run, "train"), None, bench)
    return stages.rescue_base(test)


def test_nothing_is_loaded_for_an_environment(runs_dir):
    test = reward_lab.RewardTest(None, [], None, SimpleNamespace(environment=True))
    assert stages.rescue_base(test).table.empty


@pytest.fixture
def backwards(tmp_path):
    """Rows of a task that the tiny base never solves: to write a number backwards."""
    path = tmp_path / "backwards.jsonl"
    rows = [{"question": f"Write {n} backwards.", "answer": str(n)[::-1]} for n in range(101, 999)]
    path.write_text("\n".join(json.dumps(rows[i * 7 % len(rows)]) for i in range(len(rows))))
    return {**BACKWARDS, "data.source": str(path)}


def test_a_warm_up_is_advised_where_a_worked_example_does_not_help(runs_dir, backwards):
    stage, bench = prepared("backwards", backwards)
    result = rescued(stage, bench)
    assert list(result.table["remedy"]) == ["as it is", "a worked example", "a warm-up"]
    assert list(result.table["suffices"]) == [False, False, True]
    assert result.table[PASS].iloc[-1] >= 0.3 > result.table[PASS].iloc[0] == 0
    settings = json.loads(result.advice.partition("settings = ")[2].partition(" makes ")[0])
    assert settings == {"train.sft_steps": 200, "train.sft_until": 0.3, "data.sft_rows": 128}
    assert stage.run.config().train.sft_steps == 0, "it is advised, and not adopted"
    # With these settings notebook 1 sets rows apart, and notebook 2 does the warm-up.
    again, _ = prepared("backwards", {**backwards, **settings})
    assert "ended, as pass@8 reached train.sft_until = 0.3" in stages.warm_up_base(again)
    shown = {row["question"] for row in data.load(stage.run, "sft")}
    assert not shown & {row["question"] for row in data.load(stage.run, "train")}
    looks = [line for line in stages.warm_up_curve(stage.run) if PASS in line]
    assert len(looks) > 1 and all(0 < look["distinct"] <= 1 for look in looks)
    assert all(look["entropy"] > 0 for look in looks)


def test_nothing_is_advised_where_nothing_helps(runs_dir):
    line = {"right": 0.0, PASS: 0.0, "suffices": False, "settings": {}}
    lines = [{**line, "remedy": "as it is"}, {**line, "remedy": "other", "settings": {"a": 1}}]
    assert "take easier rows (data.source)" in rescue.advice(pd.DataFrame(lines))
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
