"""Each stage is one function of the package, and its notebook does the same steps in its cells."""

import ast
import inspect
from itertools import groupby
from textwrap import dedent

import nbformat
import pytest

from grpo_nb import reward_lab
from grpo_nb.machine import PROJECT_ROOT
from grpo_nb.pipeline import launch, stages
from grpo_nb.runs import NOTEBOOKS

FUNCTIONS = {"01": stages.prepare_data, "02": stages.test_rewards, "03": stages.train_grpo}
UNFOLDED = {"open_test": reward_lab.open_test, "reward_test": reward_lab.baseline.reward_test}
SAME = {"warm_up_base": "warm_up", "begin": "Monitor"}
ONLY_IN_NOTEBOOKS = {  # what starts a stage, and what shows something without changing it
    "01": "start_stage settings show_tables show_tokens",
    "02": """start_stage settings show_tables register table score_sheet signal_table lab
        configured using adding rescue_base advised warm_up_chart warm_up_curve pass_rates
        flagged completions""",
    "03": """start_stage settings show_tables notable effective mean read_lines
        training_charts summary read_completions completions close""",
    "00": """show_tables register start settings load show_tokens read_lines
        summary training_charts close of_stage read_json before_after Chat ask files""",
}


def names_of_the_package():
    """The functions, methods and classes, and what stage 03 calls to be watched."""
    files = (PROJECT_ROOT / "grpo_nb").rglob("*.py")
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in nodes if isinstance(node, kinds)} | {"begin"}


PACKAGE = names_of_the_package()


def steps_of(source, without=""):
    """The calls of the package in a source, in order; the same one twice in a row counts once."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))  # as they are evaluated
    names = [getattr(call.func, "attr", getattr(call.func, "id", "")) for call in calls]
    steps = []
    for name in [name for name in names if name in PACKAGE and name not in without.split()]:
        steps += steps_in(UNFOLDED[name]) if name in UNFOLDED else [SAME.get(name, name)]
    return [step for step, _ in groupby(steps)]


def steps_in(function):
    return steps_of(dedent(inspect.getsource(function)), "from_main")


def code_of(name):
    notebook = nbformat.read(PROJECT_ROOT / f"notebooks/{name}.ipynb", as_version=4)
    cells = [
        cell.source
        for cell in notebook.cells
        if cell.cell_type == "code" and "setup" not in cell.metadata.get("tags", [])
    ]
    return "\n".join(source.removeprefix("%%rewards\n") for source in cells)


@pytest.mark.parametrize("stage", FUNCTIONS)
def test_a_notebook_does_the_steps_of_its_function(stage):
    cells = steps_of(code_of(NOTEBOOKS[stage]), ONLY_IN_NOTEBOOKS[stage])
    assert cells == steps_in(FUNCTIONS[stage])
    assert len(cells) > 8


@pytest.mark.parametrize("stage", ["00", *FUNCTIONS])
def test_what_is_only_in_a_notebook_is_there(stage):
    name = NOTEBOOKS.get(stage, "00_quickstart")
    assert set(ONLY_IN_NOTEBOOKS[stage].split()) <= set(steps_of(code_of(name)))


def test_the_quickstart_calls_the_functions_and_unfolds_the_training():
    """It has loaded and warmed up the policy before, and the rows too."""
    before = ("load_rewards", "load_policy", "warm_up", "load")
    training = [step for step in steps_in(stages.train_grpo) if step not in before]
    expected = ["load_policy", "prepare_data", "test_rewards", *training, "run_pipeline"]
    assert steps_of(code_of("00_quickstart"), ONLY_IN_NOTEBOOKS["00"]) == expected


def test_launcher_and_lab_take_the_same_way():
    assert "train_grpo" in steps_in(launch._train)
    last = steps_in(stages.test_rewards)[-3:]
    # The Lab starts the stage only after the verdict, so that it writes all at once.
    assert [step for step in steps_in(reward_lab.hand_on) if step in last] == last


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        ("report = data.prepare_run(stage.run)\ndata.checks(report)", ["prepare_run", "checks"]),
        ("data.checks(data.prepare_run(stage.run)).append(1)", ["prepare_run", "checks"]),
        ("judge(trial)\nprint(judge(test))\nsave(test)", ["judge", "save"]),
        ("pd.DataFrame(rows)\nlen(rows)", []),
    ],
)
def test_what_counts_as_a_step(source, steps):
    assert steps_of(source) == steps
