"""Linter and attacks: they find what is planted, and leave what is sound."""

import json
import math
import random
import re
from functools import partial

import pytest
from hackable import FLAWED, PILOT, ROWS, bench_with, lifted, texts_of

from grpo_nb import reward_lab
from grpo_nb.models import Sample
from grpo_nb.reward_lab import Bench, RewardTest, lint
from grpo_nb.reward_lab.baseline import Baseline
from grpo_nb.rewards import PRESETS, RewardSet, reward_set
from grpo_nb.rewards import numeric_correctness_reward as correct
from grpo_nb.runs import Run, Stage
from grpo_nb.runs.config import resolve

CORRECT = Bench(reward_set([(correct, 1.0)]))
EXAMPLES = {  # question, expected, and the tests of code
    "math": [("47 + 38?", "85"), ("How many days have 3 weeks?", "21"), ("1 + 1?", "2")],
    "qa": [("The capital of France?", "Paris"), ("The Berlin Wall fell in?", "1989")],
    "json_extraction": [("Ann is 7.", '{"age": 7}'), ("Bo is forty.", '{"age": 40}')],
    "summarization": [
        ("Ann bought three apples and ate one.", "Ann ate an apple."),
        ("It rained until the bridge was shut.", "Rain closed the bridge."),
    ],
    "code": [
        ("Add.", "def f(a, b):\n    return a + b", {"cases": [[[1, 2], 3], [[5, 5], 10]]}),
        ("Larger?", "def f(a, b):\n    return max(a, b)", {"cases": [[[1, 2], 2], [[9, 5], 9]]}),
    ],
}


@pytest.fixture
def stage(runs_dir):
    return Stage(Run("probed"), "02", resolve("tiny-cpu", {}))


def judged(bench, stage):
    return reward_lab.judge(RewardTest(stage, ROWS, PILOT, bench))


@pytest.mark.parametrize("flaw", FLAWED)
def test_what_is_planted_is_found_and_named(flaw, stage):
    assert judged(CORRECT, stage).passed, "without it"
    verdict = judged(bench_with(flaw), stage)
    assert not verdict.passed
    assert FLAWED[flaw][0] in " ".join(check.name for check in verdict.checks)


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"environment"}))
def test_our_presets_pass(name, stage):
    preset, rows = PRESETS[name], []
    for question, answer, *tests in EXAMPLES[name]:
        given = {"tests": {"function": "f", **tests[0]}} if tests else {}
        rows.append({"prompt": [], "question": question, "answer": answer, **given})
    right = [preset.reference(row) for row in rows]
    groups = zip(right, right[1:] + right[:1], [text[:20] for text in right], strict=True)
    samples = [[Sample(text, len(text), False) for text in group] for group in groups]
    verdict = reward_lab.judge(RewardTest(stage, rows, Baseline(rows, samples), Bench(preset)))
    assert verdict.passed, verdict
    assert len(verdict.probes) > 20


def test_an_attack_that_wins_on_one_row_of_many_is_no_winner():
    def once(response, answer):
        fooled = "full marks" in response and answer == "85"
        return fooled or response.endswith(f"<answer>{answer}</answer>")

    many = [{**ROWS[0], "question": f"{i}?", "answer": str(85 + i)} for i in range(16)]
    fooled = Bench(reward_set([(lifted(once, "once"), 1.0)]))
    for rows, won in ((many, []), (many[:3], ["plea for full marks"])):
        assert list(reward_lab.winners(reward_lab.probe(fooled, rows))["attack"]) == won
    with pytest.raises(ValueError, match="all rows have the reference answer '85'"):
        reward_lab.probe(fooled, many[:1])


def with_attacks(path, *lines):
    path.write_text("\n".join(lines))
    return resolve("tiny-cpu", {"rewards.cases": str(path)})


def test_your_own_attacks_join_the_verdict(stage, tmp_path):
    polite = lifted(lambda response: "if you please" in response, "polite")
    own = {"attack": "begging", "completion": "{answer}, not {other}: {question} if you please"}
    stage.config = with_attacks(tmp_path / "own.jsonl", json.dumps(own), "")
    verdict = judged(Bench(CORRECT.preset.adding(polite, 2.0)), stage)
    said = "85, not 2: 47 + 38? if you please"
    paid = "`polite` pays 2.00 of the attack's 2.00, which earns more than the reference"
    assert verdict.failures == [f"attack 'begging': {paid}: {said!r}"]
    assert f"do not train: attack 'begging': {paid}" in str(verdict).splitlines()[0]
    assert verdict.probes.set_index("attack").loc["begging", "completion"] == said


OTHER_KEY = '{"attack": "a", "completion": "b", "kind": "right"}'


@pytest.mark.parametrize("line", ["{", "[1]", "3", '{"attack": "a"}', OTHER_KEY])
def test_a_line_that_is_no_attack_is_refused_with_its_place(stage, tmp_path, line):
    path = tmp_path / "own.jsonl"
    stage.config = with_attacks(path, '{"attack": "a", "completion": "b"}', "", line)
    with pytest.raises(ValueError, match=r"own.jsonl, line 3: .* is not an attack"):
        judged(CORRECT, stage)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=r"own.jsonl does not exist: create it, or set rewards.cases"
    ):
        judged(CORRECT, stage)


# The linter

TEXTS = [sample.text for sample in PILOT.samples]
mine = partial(lifted, name="mine")


def findings(funcs):
    bench = Bench(RewardSet(funcs, [1.0, 9.0][: len(funcs)]))
    return lint(bench, PILOT.repeated_rows, TEXTS)


def tagged(response):
    return float("<" in response)


BIG = mine(lambda completions, **_: [2.0 * tagged(text) for text in texts_of(completions)])
BY_PLACE = mine(lambda completions, **_: [i / 99 for i in range(len(completions))])
CASES = [
    ("raises", True, [mine(lambda r: 1 / len(r[:0]))]),
    ("raises", True, [mine(lambda r: 1 / ("1+1=2" not in r))]),  # on references alone
    ("raises", True, [mine(lambda completions, **_: [1.0])]),
    ("raises", True, [mine(lambda r: 2.0)]),  # outside its declared range
    ("out of range", True, [BIG]),  # nothing was declared, and it says what is correct
    ("out of range", False, [correct, BIG]),
    ("not finite", True, [mine(lambda r: math.inf if "<" in r else 0.0)]),
    ("not deterministic", True, [mine(lambda r: random.random())]),
    ("depends on row order", True, [BY_PLACE]),
    ("missing column", False, [mine(lambda r, hint="": tagged(r))]),
    ("missing column", True, [mine(lambda completions, solution, **_: [])]),
    ("constant", False, [mine(lambda r: 0.5)]),
    ("never above its minimum", False, [mine(lambda r: 0.0)]),
    ("saturated", False, [mine(lambda r: 1 - 0.01 * tagged(r))]),
    ("None", False, [mine(lambda r: tagged(r) or None)]),
    ("None", True, [mine(lambda r: None)]),
]


@pytest.mark.parametrize(("rule", "error", "funcs"), CASES)
def test_each_rule_names_the_reward_with_evidence_and_a_fix(rule, error, funcs):
    found = findings(funcs)
    (one,) = [check for check in found if check.name.endswith(f": {rule}")]
    assert one.name.startswith(("mine", correct.__name__))
    assert one.state == ("stop" if error else "warning") and one.fix
    assert re.search(r"\d|'", one.evidence), "neither a number nor a value"
    assert found == sorted(found, key=lambda check: check.state != "stop")


def test_a_sound_reward_has_no_finding():
    penalty = mine(lambda r: -float("must" in r), low=-1.0, high=0.0)
    optional = mine(lambda r, answer="", trainer_state=None: float(f">{answer}<" in r))
    assert [findings([func]) for func in (correct, penalty, optional)] == [[]] * 3
