"""The certificate: an honest judge passes, and each habit is refused by the test that names it."""

import json
import random

import pytest
import scripted_judges as scripts
from judge_server import serving
from scripted_judges import MATH, ROWS, a_test

from grpo_nb import data, reward_lab, runs
from grpo_nb.reward_lab.certificate import certify
from grpo_nb.rewards import LLMJudge, reward_set

TESTS = ["repeatability", "length", "praise", "markup", "reference", "another answer"]


def states(checks):
    names = [check.name.split(": ")[1] for check in checks]
    return dict(zip(names, (check.state for check in checks), strict=True))


@pytest.fixture
def server(monkeypatch, runs_dir):
    with serving() as server:
        yield server


def of_script(server, script, rows=ROWS[:8]):
    server.script = [script]
    return certify(LLMJudge("m", server.url), a_test(rows, prompts=8))


def test_an_honest_judge_passes_every_test(server):
    checks = of_script(server, scripts.honest)
    assert states(checks) == dict.fromkeys(TESTS, "ok")
    assert checks[0].evidence == "right on 8 of 8 groups (68% to 100%, mark 90%)"


@pytest.mark.parametrize(
    ("script", "name"),
    [
        (scripts.length_loving, "length"),
        (scripts.flattered, "praise"),
        (scripts.by_chance, "repeatability"),
        (scripts.breaks_json, "markup"),
        (scripts.constant, "another answer"),
        (scripts.contrary, "reference"),
    ],
)
def test_each_habit_is_refused_by_the_test_that_names_it(server, script, name):
    checks = of_script(server, script)
    assert states(checks)[name] == "stop"
    (check,) = [check for check in checks if check.name == f"llm_judge: {name}"]
    assert check.fix and "mark 90%" in check.evidence
    if script in (scripts.flattered, scripts.breaks_json, scripts.constant):
        assert list(states(checks).values()).count("stop") == 1


def test_an_honest_judge_with_noise_is_refused_at_most_five_times_in_a_hundred():
    refused, tried = {}, a_test(prompts=8)
    for seed in range(100):
        noise = random.Random(seed)
        judge = scripts.InProcess("m", cache=False, script=lambda b, n=noise: scripts.honest(b, n))
        if stops := [check for check in certify(judge, tried) if check.state == "stop"]:
            refused[seed] = stops
    assert len(refused) <= 5, refused


def test_a_judge_that_is_down_is_refused_and_raises_nothing(server):
    server.script = [500]
    (check,) = certify(LLMJudge("m", server.url, retries=0), a_test(prompts=4))
    assert (check.name, check.state) == ("llm_judge: verdicts", "stop")
    assert "right on 0 of 4 groups" in check.evidence


@pytest.fixture
def run_test(server):
    """The test of a run whose data stage 01 really prepared."""
    settings = {"data.max_rows": 24}
    stage = runs.start("01", "certified", settings, profile="tiny-cpu")
    data.prepare_run(stage.run, stage.config.data, 0, lambda prompts: [10] * len(prompts))
    stage.finish("data")
    tested = a_test(data.load(stage.run, "train"), prompts=8)
    stage = runs.start("02", "certified", {"rewards.baseline_completions": 6})
    return tested._replace(stage=stage)


def test_the_gate_certifies_the_judge_and_reports_it(run_test, server):
    judge = LLMJudge("m", server.url)
    test = run_test.using(reward_set([*MATH.pairs, (judge, 0.25)], MATH))
    server.script = [scripts.honest]
    verdict = reward_lab.judge(test)
    assert verdict.passed, verdict
    warnings = [check.name for check in verdict.checks[1:-2] if check.state == "warning"]
    outcome = f"nothing says stop; warnings: {', '.join(warnings)}" if warnings else "attacks lose"
    assert verdict.checks[0].evidence == f"right answers win, {outcome}"
    reward_lab.save(test, verdict)
    report = json.loads((test.stage.run / "rewards/report.json").read_text())
    names = {f"llm_judge: {name}" for name in TESTS}
    assert names <= {check["name"] for check in report["checks"]}
    assert names <= {check["name"] for check in test.stage.run.manifest()["02"]["checks"]}


def test_the_gate_refuses_a_judge_that_is_flattered(run_test, server):
    judge = LLMJudge("m", server.url)
    test = run_test.using(reward_set([*MATH.pairs, (judge, 0.25)], MATH))
    server.script = [scripts.flattered]
    verdict = reward_lab.judge(test)
    reward_lab.save(test, verdict)
    assert [each for each in verdict.failures if each.startswith("llm_judge: praise: right on 0")]
    with pytest.raises(ValueError, match="failed their test"):
        reward_lab.refuse_untested(test.stage.run, test.bench.preset)
