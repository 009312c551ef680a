"""Stages, priming, validation, and what a training leaves for its readers."""

import json

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_resume import MATH, make_run, session  # noqa: F401 (a fixture)

from grpo_nb import models, training
from grpo_nb.runs import Run
from grpo_nb.runs.config import resolve
from grpo_nb.training import plan, validation

ROWS = [{"prompt": [], "question": str(n), "answer": str(n), "level": n % 3} for n in range(30)]
TWO = [
    {
        "name": "format",
        "max_steps": 2,
        "weights": {"soft_xml_format_reward": 1.0},
        "rows": [0, 0.5],
    },
    {
        "name": "correctness",
        "max_steps": 3,
        "learning_rate": 5e-4,
        "beta": 0.02,
        "loss_type": "grpo",
    },
]


def write_stages(path, stages):
    path.write_text(yaml.safe_dump(stages), encoding="utf-8")
    return str(path)


def planned(tmp_path, *stages):
    path = write_stages(tmp_path / "stages.yaml", list(stages))
    return plan.plan(resolve("tiny-cpu", {"train.stages": path}), MATH, ROWS)


def test_without_a_file_there_is_one_stage_as_the_run_says():
    config = resolve("tiny-cpu")
    (only,) = plan.plan(config, MATH, ROWS)
    assert (only.name, only.folder, only.config, only.rewards) == (
        "grpo",
        "train/1-grpo",
        config,
        MATH,
    )
    assert (only.first_step, only.last_step, list(only.rows)) == (0, 100, ROWS)


def test_stages_have_rewards_rows_and_settings_of_their_own(tmp_path):
    second = TWO[1] | {"where": {"level": [1, 2]}, "trl": {"epsilon_high": 0.28}}
    form, right = planned(tmp_path, TWO[0], second)
    assert (form.rewards.names, form.rewards.reward_weights) == (["soft_xml_format_reward"], [1.0])
    assert list(form.rows) == ROWS[:15]
    assert form.config.train.learning_rate == 1e-3
    assert (right.first_step, right.last_step, right.folder) == (2, 5, "train/2-correctness")
    assert right.rewards == MATH
    assert {row["level"] for row in right.rows} == {1, 2}
    assert (right.config.train.loss_type, right.config.trl) == ("grpo", {"epsilon_high": 0.28})


def test_rows_of_a_csv_file_whose_columns_are_text_are_chosen_by_number(tmp_path):
    path = write_stages(tmp_path / "stages.yaml", [{"name": "a", "where": {"level": 2}}])
    rows = [row | {"level": str(row["level"])} for row in ROWS]
    (one,) = plan.plan(resolve("tiny-cpu", {"train.stages": path}), MATH, rows)
    assert {row["level"] for row in one.rows} == {"2"}


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"max_stepz": 3}, "key of stage 'a' 'max_stepz': did you mean 'max_steps'"),
        ({"resume": "never"}, "unknown key of stage 'a' 'resume'"),
        ({"weights": {"format": 1.0}}, "unknown reward of stage 'a' 'format'"),
        ({"weights": {"soft_xml_format_reward": 0}}, "stage 'a': no reward has a weight"),
        ({"rows": [0.5, 0.5]}, "stage 'a': no row is left"),
        ({"where": {"levle": 1}}, "unknown column of rows 'levle': did you mean 'level'"),
        ({"max_steps": "many"}, "train.max_steps = 'many'"),
        ({"num_generations": 7}, "does not divide the batch"),
        ({"name": ""}, "each with its own name"),
        ({"name": "../../up"}, r"stages.yaml': name '../../up': use letters"),
        ({"name": "a/b"}, "name 'a/b': use letters"),
        ({"name": "/tmp/a"}, "name '/tmp/a': use letters"),
        ({"name": ".."}, "name '..': use letters"),
        ({"trl": {"epsilon_hig": 0.3}}, "'trl.epsilon_hig': did you mean 'trl.epsilon_high'"),
        ({"learning_rate": float("inf")}, "train.learning_rate = '.inf'"),
        ({"rows": [0, 2]}, r"stage 'a': rows = \[0, 2\]: write two shares"),
        ({"rows": 0.5}, "stage 'a': rows = 0.5: write two shares"),
        ({"weights": {"soft_xml_format_reward": float("nan")}}, "'.nan'}: write {reward: 1.0}"),
        ({"trl": 3}, "stage 'a': trl = 3: write {name: value}"),
        ({"where": 3}, "stage 'a': where = 3: write {name: value}"),
        ({1: 2}, "unknown key of stage 'a' 1"),
        ({"max_steps": True}, "train.max_steps = True: .* no value of this setting"),
        ({"weights": "all"}, "stage 'a': weights = 'all'"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(tmp_path, stage, message):
    with pytest.raises(ValueError, match=message):
        planned(tmp_path, {"name": "a"} | stage)


def test_a_file_of_stages_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train\.stages = 'nowhere.yaml' is not a file"):
        plan.plan(resolve("tiny-cpu", {"train.stages": "nowhere.yaml"}), MATH, ROWS)
    with pytest.raises(ValueError, match="each with its own name"):
        planned(tmp_path, {"name": "a"}, {"name": "a"})
    (tmp_path / "bad.yaml").write_text("- {name: [}", encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.yaml, line 1: "):
        plan.plan(resolve("tiny-cpu", {"train.stages": str(tmp_path / "bad.yaml")}), MATH, ROWS)


@given(st.integers(0, 300), st.integers(0, 80))
def test_rows_set_aside_are_few_and_never_trained_on(rows, count):
    train, aside = validation.set_aside([{"n": n} for n in range(rows)], count)
    assert len(aside) == min(count, rows // 10)
    assert sorted(row["n"] for row in train + aside) == list(range(rows))


def test_steps_that_sample_nothing_have_a_line_and_a_validation_too(session):  # noqa: F811
    fast = {"train.learning_rate": 1e-2, "train.warmup_steps": 0}
    one = session(**{"trl.num_iterations": 2, "train.max_steps": 4, "train.eval_steps": 2, **fast})
    updates = []
    one.run(updates.append)
    lines = training.read_lines(one.folder / "metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [(line["step"], "reward" in line) for line in steps] == [
        (1, True),
        (2, False),
        (3, True),
        (4, False),
    ]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 2, 4]
    assert [bool(u.completions) for u in updates if "loss" in u.line] == [True, False] * 2
    assert steps[1]["clip_ratio/region_mean"] > 0, "the policy has moved since it sampled"


def test_two_stages_train_one_adapter_and_each_leaves_its_manifest(session, tmp_path):  # noqa: F811
    path = write_stages(tmp_path / "stages.yaml", TWO)
    updates = []
    metrics = session(**{"train.stages": path}).run(updates.append)
    assert [(line["step"], line["stage"]) for line in metrics] == [
        *((step, "format") for step in (1, 2)),
        *((step, "correctness") for step in (3, 4, 5)),
    ]
    assert "kl" not in metrics[1] and metrics[2]["kl"] == pytest.approx(0, abs=1e-3)
    folder = Run("here") / "train"
    first, second = (
        json.loads((folder / name / "stage.json").read_text())
        for name in ("1-format", "2-correctness")
    )
    assert first["rewards"] == {"soft_xml_format_reward": 1.0}
    assert (first["steps"], second["steps"], second["settings"]["beta"]) == (2, 3, 0.02)
    frame = training.read_completions(
        Run("here"), MATH, models.load_tokenizer("data/tiny_base"), 32
    )
    assert frame["step"].unique().tolist() == [1, 2, 3, 4, 5]
    assert frame[frame["step"] <= 2]["numeric_correctness_reward"].isna().all()
    assert {update.total_steps for update in updates} == {5}


def test_the_worst_step_of_a_later_stage_is_seen_before_the_first(session, tmp_path):  # noqa: F811
    stages = [TWO[0], TWO[1] | {"max_completion_length": 250}]
    path = write_stages(tmp_path / "stages.yaml", stages)
    long = session(**{"train.stages": path, "model.max_seq_length": 512})
    first = long.overview()
    assert first["steps"].tolist() == ["1 to 2", "3 to 5"]
    assert first["rewards"].iloc[0] == "1 soft_xml_format_reward"
    checks = long.preflight()
    assert set(checks["result"]) == {"ok"}
    seen = checks[checks["check"] == "context"].set_index("stage")["seen"]
    assert "completion 32" in seen["format"] and "completion 250" in seen["correctness"]
    assert "TRL's default" in set(long.arguments()["from"])


def test_an_update_tells_of_each_completion_with_its_total(session):  # noqa: F811
    updates = []
    session(**{"train.max_steps": 2, "train.eval_steps": 2}).run(updates.append)
    begun, first, second, validated = updates
    assert begun.line["step"] == 0 and "eval/accuracy" in begun.line
    assert len(first.completions) == 16
    for one in first.completions:
        scores = [one[name] for name in MATH.names]
        assert one["reward"] == pytest.approx(np.dot(scores, MATH.reward_weights))
        assert {"question", "completion", "advantage"} <= set(one)
    totals = [one["reward"] for one in second.completions]
    assert second.line["reward"] == pytest.approx(np.mean(totals), abs=1e-6)
    groups = np.array(totals).reshape(2, 8)
    assert second.line["groups/reward_p50"] == pytest.approx(np.median(groups.mean(axis=1)))
    assert second.line["groups/reward_std"] == pytest.approx(
        groups.std(axis=1, ddof=1).mean(), abs=1e-6
    )
    assert validated.completions == [] and validated.line["step"] == 2
    assert 0 <= validated.line["eval/accuracy"] <= 1


def test_the_phases_of_a_step_add_up(session):  # noqa: F811
    for line in session(**{"train.max_steps": 2}).run():
        phases = sum(line[f"seconds/{phase}"] for phase in ("generation", "reward", "update"))
        assert phases == pytest.approx(line["step_time"])
        assert line["tokens_per_second"] > 0 and 0.1 < line["memory_gib"] < 24


def test_the_best_adapter_is_handed_on_and_a_plateau_ends_the_training(session, monkeypatch):  # noqa: F811
    accuracies = iter([0.3, 0.5, 0.75, 0.75, 0.5, 0.25])
    monkeypatch.setattr(
        validation.Validation, "__call__", lambda self: {"eval/accuracy": next(accuracies)}
    )
    early = session(**{"train.eval_steps": 1, "train.early_stop_evals": 2})
    metrics = early.run()
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5]
    folder = early.stage.run / "train"
    best = json.loads((folder / "best/eval.json").read_text())
    assert best == {"step": 3, "eval/accuracy": 0.75}
    kept, last = (
        (folder / name / "adapter_model.safetensors").read_bytes()
        for name in ("adapter", "1-grpo/adapter")
    )
    assert kept == (folder / "best/adapter_model.safetensors").read_bytes() != last


def test_validation_leaves_the_training_as_it_would_be(session):  # noqa: F811
    def steps(**settings):
        lines = session(**{"train.max_steps": 3, "train.resume": "never"} | settings).run()
        return [(line["reward"], line["loss"], line["grad_norm"]) for line in lines]

    assert steps(**{"train.eval_steps": 1}) == steps(**{"train.eval_steps": 3})


def test_the_policy_writes_as_the_primed_rows_do_before_the_first_group(session, capsys):  # noqa: F811
    run = make_run("here", **{"data.priming_rows": 64, "data.max_rows": 200})
    settings = {"train.max_steps": 1, "train.eval_steps": 0, "train.resume": "never"}

    def as_primed(**more):
        """Share of the first step's completions that begin as the reference does."""
        one = session(**settings | more)
        one.run()
        texts = training.read_completions(run, MATH, one.policy.tokenizer, 32)["completion"]
        return texts.str.startswith(MATH.reference({"answer": "7"})[:16]).mean()

    assert as_primed() < 0.5
    primed = {"train.priming_steps": 60, "train.priming_learning_rate": 2e-3}
    assert as_primed(**primed) > 0.7
    assert "primed in 60 supervised steps: loss" in capsys.readouterr().out
    about = json.loads((run / "train/0-priming/stage.json").read_text())
    assert about["loss_last"] < about["loss_first"] / 3


def test_priming_without_rows_is_refused(session):  # noqa: F811
    with pytest.raises(ValueError, match=r"set data\.priming_rows in notebook 1"):
        session(**{"train.priming_steps": 5}).run()
