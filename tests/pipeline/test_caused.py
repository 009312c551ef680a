"""Did the reward do it: what a placebo is paid, how it is made of a run, and each verdict."""

import re
import shutil

import numpy as np
import pytest
import torch
from answered import MATH, answers

from grpo_nb import evaluation, stages, training
from grpo_nb.__main__ import main
from grpo_nb.checks import Check
from grpo_nb.files import write_json
from grpo_nb.pipeline import caused, checklist, notebooks
from grpo_nb.rewards import Adaptive, gated, load_preset, reward_set, soft_format_reward
from grpo_nb.runs import NOTEBOOKS, Run, config
from grpo_nb.training.placebo import true_reward


def rows_of(rewards, group):
    """Of each group the rows, in an order that does not depend on theirs."""
    return [sorted(map(str, part.tolist())) for part in rewards.split(group)]


def test_a_training_is_paid_shuffled_rewards_and_validated_by_true_ones(start, capsys):
    one, scored = start(**{"train.placebo": "shuffled", "grpo.max_steps": 1}), []
    calculate = one.reward_funcs[0]

    def keep(**columns):
        scored.append(true_reward(calculate)(**columns))
        return calculate(**columns)

    one.reward_funcs[0] = keep
    one.train()
    paid = torch.tensor(list(one._logs["rewards"][MATH.names[0]]))
    earned = torch.tensor(scored[0])
    assert rows_of(paid, 8) == rows_of(earned, 8) and not torch.equal(paid, earned)
    lines = training.read_lines(one.folder / "metrics.jsonl")
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [0, 1]
    one.stage.run.write_config(one.stage.config)  # as stage 03 does
    stages.read_completions(one.stage.run, MATH)
    assert "a placebo: these scores are shuffled" in capsys.readouterr().out


def _marked(completions, **_):
    return [2.0 * ("<answer>" in turns[0]["content"]) for turns in completions]


def _sized_format_reward(completions, **_):
    return [len(turns[0]["content"]) / 999 for turns in completions]


def _right_format_reward(completions, **columns):
    chats = zip(completions, columns["answer"], strict=True)
    return [float(f"<answer>{a}</answer>" in turns[0]["content"]) for turns, a in chats]


def test_what_pays_for_the_form_is_seen_in_what_it_pays_and_not_in_its_name():
    others = [(f.configured(f"reward_{n}"), w) for n, (f, w) in enumerate(MATH.pairs)]
    assert reward_set(others).format_name == "reward_1"
    assert reward_set(others[2:]).format_name == "reward_2"
    own = reward_set([(_right_format_reward, 1.0), (_sized_format_reward, 1.0), (_marked, 0.5)])
    assert own.format_name == "_marked"
    of_json = load_preset("json_extraction")
    assert of_json.format_name == of_json.names[1]
    gate = gated(MATH.reward_funcs[0], by=soft_format_reward)
    for answer in (gate, Adaptive(gate)):  # an answer behind a format is no format
        behind = reward_set([(answer, 1.0), (soft_format_reward, 0.5)])
        assert behind.format_name == "soft_format_reward"


def made(name, base, trained, kind="none", **settings):
    """A run as its four stages leave it; a letter a prompt is what its models answered."""
    run, settled = Run(name), config.resolve("tiny-cpu", settings | {"train.placebo": kind})
    answer(run, answers(base), answers(trained))
    write_json(run / "train/state.json", {"settings": {"grpo.max_steps": "60"}})
    (run / "data").mkdir()
    for name in ("eval", "train"):
        (run / f"data/{name}.parquet").write_bytes(b"rows")
    read = {}
    for stage in NOTEBOOKS:
        written = run.files(*{"01": ["data"], "04": ["eval"]}.get(stage, []))
        entry = {"status": "done", "seconds": 1.0, "inputs": dict(read), "outputs": written}
        run.record(stage, entry | {"checks": [Check("reward rises", "ok", "+0.3")._asdict()]})
        read |= written
    run.write_config(settled)
    return run


def answer(run, base, trained):
    """The files of an evaluation that a verdict is read from."""
    samples = {"base": base, "merged": trained}
    evaluation.save(run, evaluation.Evaluation(samples, {"greedy": dict.fromkeys(samples)}))


def right(count, of=40):
    """The first so many prompts answered as the reference has it."""
    return "1" * count + "2" * (of - count)


@pytest.mark.parametrize(
    ("base", "trained", "placebo", "verdict", "said"),
    [
        (right(10), right(38), right(10), caused.CAUSED, r"did it: .*25.0 % → 95.0 %, \+70.0 po"),
        (right(10), right(38), right(6), caused.CAUSED, "15.0 % → 95.0 %"),
        (right(10), right(38), right(24), caused.PART, r", 35.0 of 70.0 points gained \(50%\): "),
        (right(10), right(38), right(37), caused.AS_MUCH, r"as much: .*\+2.5 points \(95 % int"),
        (right(10), right(30), right(40), caused.AS_MUCH, "100.0 % → 75.0 %, -25.0 points"),
        (right(20), right(27), right(23), caused.CANNOT_SAY, "own gain is not distinguishable"),
        (right(10), right(12), right(2), caused.CANNOT_SAY, "mine is not better than its base"),
        (right(10), right(2), right(10), caused.CANNOT_SAY, "mine is not better than its basel"),
        ("22222", "11111", "22222", caused.CANNOT_SAY, "say: 5 held-out prompts are too few"),
    ],
)
def test_each_verdict_comes_with_its_figures(runs_dir, base, trained, placebo, verdict, said):
    run = made("mine", base, trained)
    found = caused.compare(run, made("mine-shuffled", base, placebo, "shuffled"))
    assert found.verdict == verdict and found.sentence.startswith(verdict)
    (check,) = caused.caused(run)
    assert check.evidence == found.sentence and re.search(said, found.sentence)
    assert (check.state == "ok") == (verdict == caused.CAUSED)
    assert checklist.examine(run)[-1] == {"stage": "all", **check._asdict()}
    assert not np.isnan(found.pair["differences"]["accuracy"]["difference"])


def test_a_reward_that_did_not_rise_is_not_the_cause(runs_dir):
    """Drift gains too: of 20 random rewards two were better than their baseline and placebo."""
    run, placebo = made("mine", right(10), right(38)), made("p", right(10), right(10), "shuffled")
    run.record("03", {"checks": [Check("reward rises", "warning", "+0.0")._asdict()]})
    assert caused.compare(run, placebo).verdict == caused.CANNOT_SAY
    assert "did not rise during training" in caused.compare(run, placebo).sentence


def test_a_run_says_whether_it_has_a_placebo_and_how_one_is_made(runs_dir):
    run = made("mine", right(10), right(38))
    (check,) = caused.caused(run)
    assert (check.name, check.state) == ("caused by the reward", "not yet")
    assert check.fix == "python -m grpo_nb run --name mine --placebo shuffled"
    placebo = made("mine-shuffled", right(10), right(36), "shuffled")
    placebo.record("04", {"status": "failed"})
    (again,) = caused.caused(run)
    assert again == check._replace(evidence="04_merge_and_infer of 'mine-shuffled' is failed")
    (own,) = caused.caused(made("a-shuffled", "1", "1", "shuffled"))
    assert own.state == "ok" and "itself a placebo" in own.evidence


OTHERS = answers(right(10), questions=[f"x{i}" for i in range(40)])


SEED = {"settings": {"seed": "1"}}


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda run: (run / "data/eval.parquet").write_bytes(b""), "differ in data/eval.parquet"),
        (lambda run: answer(run, OTHERS, OTHERS), "answered different held-out prompts"),
        (lambda run: write_json(run / "train/state.json", SEED), "differ in seed, grpo.max_steps"),
        (lambda run: (run / "eval/report.json").unlink(), "report.json"),
    ],
)
def test_a_placebo_that_proves_nothing_is_refused(runs_dir, spoil, why):
    run = made("mine", right(10), right(38))
    placebo = made("mine-shuffled", right(10), right(12), "shuffled")
    spoil(placebo)
    with pytest.raises((ValueError, FileNotFoundError), match=why):
        caused.compare(run, placebo)
    (check,) = caused.caused(run)
    assert check.state == "warning" and "--placebo shuffled" in check.fix


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A folder of runs of which no placebo can be made, and one of which it can."""
    folder = tmp_path_factory.mktemp("several")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_NB_RUNS", str(folder))
        for name in ("mine", "half", "taken"):
            made(name, right(10), right(38))
        made("mine-placebo", right(10), right(38), "shuffled")
        made("taken-shuffled", right(10), right(38))
        Run("half").record("04", {"status": "failed"})
    return folder


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--name no", "needs a run that is trained and evaluated, but 01_prepare_data of 'no'"),
        ("--name half", "04_merge_and_infer of 'half' is failed"),
        ("--name mine-placebo", "'mine-placebo' is itself a placebo, or"),
        ("--name taken", "taken-shuffled is none: give another run"),
        ("--name mine --placebo shufled", "'shufled': did you mean 'shuffled'?"),
        ("--name mine --set seed=1", "no other option except --dry-run and --force"),
        ("--name mine --only 04", "as it was: give its --name, and no other"),
        ("", "repeats a finished run as it was: give its --name"),
    ],
)
def test_what_no_placebo_is_made_of_starts_nothing(several, monkeypatch, capsys, arguments, said):
    monkeypatch.setenv("GRPO_NB_RUNS", str(several))
    before = sorted(several.rglob("*"))
    assert main(["run", "--placebo", "shuffled", *arguments.split()]) == 2
    assert said in capsys.readouterr().err
    assert sorted(several.rglob("*")) == before


def test_a_placebo_takes_over_what_was_set_and_trains_once(
    demo_run, forks, tmp_path, monkeypatch, capsys
):
    """Real notebooks 3 and 4, on a copy of the suite's run; cut off once before they begin."""
    shutil.copytree(demo_run.path, tmp_path / "demo")
    monkeypatch.setenv("GRPO_NB_RUNS", str(tmp_path))
    run, command = Run("demo"), ["run", "--name", "demo", "--placebo", "shuffled"]
    assert main([*command, "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "demo-shuffled, profile tiny-cpu: 03_train_grpo, 04_merge_and_infer" in said
    assert not (tmp_path / "demo-shuffled").exists()

    def cut_off(*args, **kwargs):
        raise notebooks.StageFailed("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(notebooks, "run_pipeline", cut_off)
        assert main(command) == 1
    placebo = Run("demo-shuffled")
    assert (list(placebo.manifest()), placebo.undone()) == (["01", "02"], "03")
    assert main(command) == 0
    assert "cannot say: demo is not better than its baseline" in capsys.readouterr().out
    assert caused.differences(run, placebo) == []
    ours, theirs = (config.flatten(one.config()) for one in (run, placebo))
    assert {name for name in ours if ours[name] != theirs[name]} == {"train.placebo"}
    for stage in ("01", "02"):
        assert placebo.manifest()[stage]["started"] == run.manifest()[stage]["started"]
    began = placebo.manifest()["03"]["started"]
    caused.run_placebo("demo", "shuffled")
    assert placebo.manifest()["03"]["started"] == began, "what is done is not done again"
