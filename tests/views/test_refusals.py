"""How a refusal looks in IPython: one line, and the traceback of everything else."""

import pytest
from IPython.core.interactiveshell import InteractiveShell

from grpo_nb import refusals


@pytest.fixture
def shown(capsys):
    """What a cell prints in a shell that shows refusals in one line."""
    shell = InteractiveShell.instance()
    refusals.in_one_line()

    def run(code):
        result = shell.run_cell(code)
        assert result.error_in_exec is not None
        return capsys.readouterr().out

    yield run
    InteractiveShell.clear_instance()


def test_a_refusal_is_one_line_and_its_traceback_is_at_hand(shown, capsys):
    text = shown("from grpo_nb import check_rewards\ncheck_rewards(len, [])")
    [line] = text.strip().splitlines()
    assert line.startswith(f"{refusals.RED}dataset = [] holds no rows: give")
    InteractiveShell.instance().run_line_magic("tb", "")
    assert "Traceback" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        "int('x')",  # a person's own mistake
        "from grpo_nb.stats import pass_at_k\npass_at_k('x', 1)",  # raised by a library
    ],
)
def test_any_other_exception_keeps_its_traceback(shown, code):
    assert "Traceback" in shown(code)


def test_the_error_of_a_reward_is_its_line(shown):
    code = """def mine(completions, **_): raise KeyError("mine")
from grpo_nb.reward_lab import Bench
from grpo_nb.rewards import reward_set
row = {"prompt": "a", "question": "a", "answer": "1"}
Bench(reward_set([(mine, 1.0)])).table([row], [["b"]])"""
    lines = shown(code).strip().splitlines()
    assert "KeyError: 'mine'" in lines[0] and 'raise KeyError("mine")' in lines[1]


def test_a_missing_argument_names_the_columns_that_there_are(shown):
    code = """from grpo_nb.rewards import call
def correct(completions, solution): return [1.0]
call(correct, completions=["a"], answer=["b"], level=["c"], trainer_state=None)"""
    text = shown(code)
    assert "reward correct: missing a required argument: 'solution'; the dataset has" in text
    assert "the columns answer, level: rename" in text and "Traceback" not in text


def test_outside_a_notebook_nothing_is_done():
    assert refusals.in_one_line() is None
