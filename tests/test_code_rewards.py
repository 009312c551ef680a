"""Code that is run, and mathematics that is checked, as rewards."""

import pytest

from grpo_nb import rewards
from grpo_nb.rewards import load_preset

TESTS = {"function": "f", "cases": [[[1], 2], [[2], 3]]}
RIGHT = "```python\ndef f(x):\n    return x + 1\n```"


@pytest.mark.parametrize(
    ("text", "score", "reason"),
    [
        (RIGHT, 1.0, ""),
        (f"<answer>\n{RIGHT}\n</answer>", 1.0, ""),
        ("<answer>def f(x): return x + 1</answer>", 1.0, ""),
        (RIGHT.replace("x + 1", "2"), 0.5, "wrong value: got 2, expected 3"),
        (RIGHT.replace("x + 1", "1 / 0"), 0.0, "raised ZeroDivisionError"),
        ("```python\nwhile True: pass\n```", 0.0, "timed out after 1 s"),
        ("```python\nimport os\nprint('PASS'); os._exit(0)\n```", 0.0, ""),
        ("def f(x): return x + 1", 0.0, "no code in a fenced block"),
    ],
)
def test_code_is_scored_by_its_tests(text, score, reason):
    func = rewards.code_execution_reward.configured(seconds=1.0)
    (scored,) = func.explain(completions=[text], tests=[TESTS])
    assert scored.score == score
    assert reason in scored.reason


def test_each_completion_is_run_against_its_own_tests():
    other = {"function": "f", "cases": [[[1], 1]]}
    func = rewards.code_execution_reward
    assert func(completions=[RIGHT, RIGHT], tests=[TESTS, other]) == [1.0, 0.0]


def test_all_or_none_is_an_option():
    func = rewards.code_execution_reward.configured(partial=False)
    completions = [RIGHT, RIGHT.replace("x + 1", "2")]
    assert func(completions=completions, tests=[TESTS] * 2) == [1.0, 0.0]


def test_code_generation_weighs_format_syntax_and_execution():
    texts = [RIGHT, RIGHT.replace("x + 1", "2"), "```python\ndef f(:\n```", "nothing"]
    scores = rewards.code_generation_reward(completions=texts, tests=[TESTS] * 4)
    assert scores == [1.0, 0.625, 0.125, 0.0]


def test_the_reference_of_the_code_preset_wins():
    preset = load_preset("code")
    row = {"answer": "def f(x):\n    return x + 1", "tests": TESTS}
    for func in preset.reward_funcs:
        columns = {name: [row[name]] for name in func.columns}
        assert func(completions=[preset.reference(row)], **columns) == [func.range[1]]


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"\boxed{\frac{\sqrt{2}}{2}}", r"\frac{1}{\sqrt{2}}", 1.0),
        (r"<answer>$(-1, 3]$</answer>", "(-1,3]", 1.0),
        ("<answer>x^2 - 1</answer>", "(x-1)(x+1)", 1.0),
        ("<answer>0.5</answer>", "1/2", 1.0),
        ("<answer>17 = 18</answer>", "18", 0.0),
        ("<answer>17 or 18</answer>", "18", 0.0),
        ("<answer>it is not 18</answer>", "18", 0.0),
        ("<answer>1e5</answer>", "1", 0.0),
        ("<answer>9^{9^{9^{9}}}</answer>", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_mathematics(text, gold, score):
    assert rewards.math_verify_reward(completions=[text], answer=[gold]) == [score]


def test_numbers_are_settled_without_math_verify():
    (scored,) = rewards.math_verify_reward.explain(completions=["18.0"], answer=["18"])
    assert scored == (1.0, "compared as numbers")
