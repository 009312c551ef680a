"""Every rule of the linter, on the pilot of `hackable.py`."""

import math
import random
import re
import time
from functools import partial

import pytest
from hackable import PILOT, ROWS, lifted, texts_of

from grpo_nb.reward_lab import Bench, lint
from grpo_nb.rewards import RewardSet
from grpo_nb.rewards import numeric_correctness_reward as correct

TEXTS = [sample.text for sample in PILOT.samples]
mine = partial(lifted, name="mine")


def findings(funcs, step_seconds=0.0):
    rows = [row for row in ROWS for _ in PILOT.samples_P_G[0]]
    bench = Bench(RewardSet(funcs, [1.0, 9.0][: len(funcs)]))
    return lint(bench, rows, TEXTS, step_seconds, batch=24)


def tagged(response):
    return float("<" in response)


BIG = mine(lambda completions, **_: [2.0 * tagged(text) for text in texts_of(completions)])
BY_PLACE = mine(lambda completions, **_: [i / 99 for i in range(len(completions))])
CASES = [
    ("raises", True, [mine(lambda r: 1 / len(r[:0]))], {}),
    ("raises", True, [mine(lambda r: 1 / ("1+1=2" not in r))], {}),  # on references alone
    ("wrong length", True, [mine(lambda completions, **_: [1.0])], {}),
    ("out of range", True, [mine(lambda r: 2.0)], {}),
    ("out of range", True, [BIG], {}),  # nothing was declared, and it says what is correct
    ("out of range", False, [correct, BIG], {}),
    ("not finite", True, [mine(lambda r: math.inf if "<" in r else 0.0)], {}),
    ("not deterministic", True, [mine(lambda r: random.random())], {}),
    ("depends on row order", True, [BY_PLACE], {}),
    ("missing column", False, [mine(lambda r, hint="": tagged(r))], {}),
    ("missing column", True, [mine(lambda completions, solution, **_: [])], {}),
    ("constant", False, [mine(lambda r: 0.5)], {}),
    ("never above its minimum", False, [mine(lambda r: 0.0)], {}),
    ("saturated", False, [mine(lambda r: 1 - 0.01 * tagged(r))], {}),
    ("dominates the sum", False, [correct, mine(tagged)], {}),
    ("two rewards alike", False, [correct, correct.configured("again")], {}),
    ("slow", False, [mine(lambda r: time.sleep(0.002) or tagged(r))], {"step_seconds": 0.1}),
    ("None", False, [mine(lambda r: tagged(r) or None)], {}),
    ("None", True, [mine(lambda r: None)], {}),
]


@pytest.mark.parametrize(("rule", "error", "funcs", "given"), CASES)
def test_each_rule_names_the_reward_with_evidence_and_a_fix(rule, error, funcs, given):
    found = findings(funcs, **given)
    (one,) = [check for check in found if check.name.endswith(f": {rule}")]
    assert one.name.startswith(("mine", correct.__name__))
    assert one.state == ("stop" if error else "warning") and one.fix
    assert re.search(r"\d|'", one.evidence), "neither a number nor a value"
    assert found == sorted(found, key=lambda check: check.state != "stop")


def test_a_sound_reward_has_no_finding():
    penalty = mine(lambda r: -float("must" in r), low=-1.0, high=0.0)
    optional = mine(lambda r, answer="", trainer_state=None: float(f">{answer}<" in r))
    assert [findings([func], step_seconds=1.0) for func in (correct, penalty, optional)] == [[]] * 3
