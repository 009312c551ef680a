"""What every part keeps to: light imports, one direction, short files."""

import ast
import subprocess
import sys

import pytest

from grpo_nb.runs import PROJECT_ROOT

MODULES = sorted((PROJECT_ROOT / "grpo_nb").rglob("*.py"))
HEAVY = {"torch", "unsloth", "trl", "vllm"}
IMPORTED_LATE = {"grpo_nb/training/trainer.py"}  # by `training.Trainer`, when the policy is loaded
MAY_IMPORT_HEAVY = {"models", "training", "export"}
FLOORS = [
    {"machine"},
    {"runs", "colab"},
    {"rewards"},
    {"data", "models"},
    {"reward_lab"},
    {"training", "export"},
    {"evaluation"},
    {"views"},
    {"pipeline"},
    {"__main__"},
]
LEVEL = {module: level for level, modules in enumerate(FLOORS) for module in modules}


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from names if node.module == "grpo_nb" else [node.module]


def part_of(path):
    return path.relative_to(PROJECT_ROOT / "grpo_nb").parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
def test_imports_follow_the_direction_of_the_data(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    part = part_of(path)
    top_level = {name.partition(".")[0] for name in imported(tree.body)}
    if str(path.relative_to(PROJECT_ROOT)) not in IMPORTED_LATE:
        assert not top_level & HEAVY, "import it inside the function that needs it"
    anywhere = list(imported(ast.walk(tree)))
    if part not in MAY_IMPORT_HEAVY:
        assert not {name.partition(".")[0] for name in anywhere} & HEAVY
    for name in anywhere:
        if name.startswith("grpo_nb.") and part != "__init__":
            other = name.split(".")[1]
            assert other == part or LEVEL[other] < LEVEL[part], f"{part} imports {other}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PROJECT_ROOT)))
def test_functions_stay_short(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            body = [n for n in node.body if not isinstance(n, ast.Expr)] or node.body
            assert node.end_lineno - body[0].lineno < 40, node.name


@pytest.mark.parametrize("arguments", ["import grpo_nb", "from grpo_nb.__main__ import main"])
def test_importing_loads_nothing_heavy(arguments):
    probe = f"{arguments}; import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & (HEAVY | {"pandas", "numpy", "transformers", "pydantic", "rich"})


def test_help_needs_nothing_heavy():
    command = [sys.executable, "-X", "importtime", "-m", "grpo_nb", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "doctor" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.split()[-1] in HEAVY | {"pandas"}]
