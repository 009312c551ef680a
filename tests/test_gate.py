"""The verdict on a run's rewards, and whether stage 03 lets them train."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hackable import lifted

from grpo_nb import bench, data, pilot
from grpo_nb.models import Sample
from grpo_nb.rewards import load_preset, reward_set
from grpo_nb.runs import start_stage

RUN = {"run_name": "gate", "profile": "tiny-cpu"}
MATH = load_preset("math")
STALE = "the rewards or their weights are not those that were tested"


@pytest.fixture
def lab(runs_dir):
    """Stage 02 of a run whose data stage 01 really prepared, with a pilot."""
    stage = start_stage("01", RUN | {"eval_rows": 8, "max_rows": 24})
    data.prepare(stage.run, stage.config.data, 0, lambda prompts: [10] * len(prompts))
    stage.finish("data")
    stage = start_stage("02", RUN | {"pilot_completions": 2})
    rows = data.load(stage.run, "train")
    said = [[Sample(MATH.reference(row), 9, False), Sample("?", 2, False)] for row in rows[:4]]
    tried = pilot.sample(stage.run, rows[:4], stage.config, lambda prompts: said)
    return SimpleNamespace(stage=stage, run=stage.run, rows=rows, pilot=tried)


def judged(lab, preset):
    verdict = bench.judge(bench.Bench(preset), lab.rows, lab.pilot, lab.stage)
    bench.save(lab.run, bench.Bench(preset), verdict)
    return verdict


def refused(lab, preset, problem):
    with pytest.raises(ValueError, match=f"{problem}.* run 02_test_rewards.ipynb again"):
        bench.check(lab.run, preset)
    assert problem in bench.check(lab.run, preset, force=True)


def test_a_verdict_that_passed_lets_stage_03_start_with_the_same_rewards_alone(lab):
    refused(lab, MATH, "rewards/report.json is missing")
    assert judged(lab, MATH).passed
    lab.stage.finish("rewards")
    rewards = start_stage("03", RUN).config.rewards
    assert bench.check(lab.run, load_preset(rewards.preset, rewards.reward_weights))
    refused(lab, load_preset("math", "1, 0.5, 0.25, 0"), STALE)
    looser = MATH.reward_funcs[0].configured(MATH.names[0], relative=0.5)
    refused(lab, MATH._replace(reward_funcs=[looser, *MATH.reward_funcs[1:]]), STALE)


def test_a_failed_verdict_says_what_won_and_what_the_reference_reads(lab):
    never = lifted(lambda response, answer: float(response == f"{answer}!"), "never")
    verdict = judged(lab, reward_set([(never, 1.0)]))
    first, *more = verdict.failures
    reference = MATH.reference(lab.rows[0])
    assert first.startswith("the gold loses on ") and f"{reference!r}, earns 0 of 1" in first
    refused(lab, reward_set([(never, 1.0)]), f"and {len(more)} more in rewards/report.json")
    report = json.loads((lab.run / "rewards/report.json").read_text())
    shown = {line["attack"]: line["completion"] for line in report["probes"]}
    assert shown["the reference"] in [MATH.reference(row) for row in lab.rows]
    assert shown["empty completion"] == ""


MINE = """from grpo_nb import rewards
def helper(response): return 0.5 * len(response[:1])
@rewards.reward()
def mine(response: str) -> float: return 0.5 * helper(response)"""


@pytest.mark.parametrize(("name", "line"), [("mine", "0.5 * len"), ("json", "0.5 * helper")])
def test_a_changed_source_of_a_users_file_is_refused(lab, tmp_path, name, line):
    (tmp_path / "set.yaml").write_text(f"[{{reward: '{name}.py:mine'}}]")
    for source, problem in ((MINE, "failed"), (MINE.replace(line, f"0 + {line}"), STALE)):
        (tmp_path / f"{name}.py").write_text(source)
        preset = load_preset(str(tmp_path / "set.yaml"))
        if source == MINE:
            judged(lab, preset)
        refused(lab, preset, problem)


FAILING = {
    "attack 'empty completion' earns as much": lambda response: len(response) < 90,
    "mine: raises: ZeroDivisionError": lambda response: 1 / len(response[:0]),
    "attack 'empty tags' earns as much": lambda response: 1.0 if response[1:] else None,
}


@pytest.mark.parametrize("reason", FAILING)
def test_a_failed_verdict_is_refused_with_its_reasons(lab, reason):
    preset = reward_set([(lifted(FAILING[reason], "mine"), 1.0)])
    judged(lab, preset)
    refused(lab, preset, reason)


ADOPT = """from grpo_nb import bench, rewards, runs
stage = runs.Stage(runs.Run("gate"), "02", runs.Run("gate").config(), {})
@rewards.reward()
def mine(response: str) -> float: return 0.5 * (response == "so")
ours = bench.adopt(bench.Bench(rewards.load_preset("math")), stage, mine, 0.25)
bench.adopt(ours, stage, mine, 0.75)  # another weight, not a second reward
"""
SHOW = """from grpo_nb import bench, rewards, runs
preset = rewards.load_preset(runs.Run("gate").config().rewards.preset)
scores = preset.reward_funcs[-1](completions=["so", "no"])
print(preset.names, preset.reward_weights, scores, bench.fingerprint(preset))"""


def test_a_reward_that_a_notebook_adopts_is_the_same_in_a_fresh_process(lab):
    command = [sys.executable, "-m", "IPython", "-c"]
    adopted = subprocess.check_output([*command, ADOPT + SHOW], text=True)
    assert subprocess.check_output([*command, SHOW], text=True) == adopted
    assert adopted.startswith(f"{[*MATH.names, 'mine']} {[*MATH.reward_weights, 0.75]} [0.5, 0.0]")


@pytest.mark.parametrize("weights", [[1.0, 0.5, 0.25, 0.0625], [1.0, 0.25, 0.25, 1 / 9]])
def test_written_weights_reach_the_run_and_stage_03_takes_them(lab, weights):
    judged(lab, MATH)
    lab.stage.finish("rewards")
    given = bench.Bench(MATH._replace(reward_weights=weights))
    assert bench.write_weights(given, lab.rows, lab.pilot, lab.stage)[0].passed
    written = start_stage("03", RUN).config.rewards.reward_weights
    assert lab.run.settings() == {"rewards.reward_weights": written}
    assert bench.check(lab.run, load_preset("math", written))
