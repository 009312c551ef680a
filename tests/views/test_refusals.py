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
    lines = text.strip().splitlines()
    assert len(lines) == 2 and "ValueError: dataset = [] holds no rows: give" in lines[0]
    assert lines[1] == "(%tb shows where)"
    InteractiveShell.instance().run_line_magic("tb", "")
    assert "Traceback" in capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [
        "int('x')",  # a person's own mistake
        "def mine(completions, **_): raise ValueError('mine')\n"
        "from grpo_nb.rewards import call\ncall(mine, completions=['a'])",
        "from grpo_nb.stats import pass_at_k\npass_at_k('x', 1)",  # raised by a library
    ],
)
def test_any_other_exception_keeps_its_traceback(shown, code):
    assert "Traceback" in shown(code)


def test_a_missing_argument_names_the_columns_that_there_are(shown):
    code = """from grpo_nb.rewards import call
def correct(completions, solution): return [1.0]
call(correct, completions=["a"], answer=["b"], level=["c"], trainer_state=None)"""
    text = shown(code)
    assert "reward correct: missing a required argument: 'solution'; the dataset has" in text
    assert "the columns answer, level: rename" in text and "Traceback" not in text


def test_outside_a_notebook_nothing_is_done():
    assert refusals.in_one_line() is None
