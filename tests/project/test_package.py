"""What every part keeps to: light imports, one direction, short files."""

import ast
import subprocess
import sys
from functools import cache

import networkx as nx

from grpo_nb.machine import PROJECT_ROOT

MODULES = sorted((PROJECT_ROOT / "grpo_nb").rglob("*.py"))
HEAVY = {"torch", "unsloth", "trl", "vllm"}
MAY_IMPORT_HEAVY = {"models", "training", "stages", "export", "ranks"}
# By `stages.RunTrainer` and `engine_of`, once the model is loaded.
IMPORTED_LATE = ("stages/trainer.py", "models/dense.py")
FLOORS = [
    {"machine", "checks", "lazy", "stats"},
    {"files"},
    {"names", "ranks"},
    {"runs", "colab", "sandbox"},
    {"answers"},
    {"rewards"},
    {"models"},
    {"data"},
    {"environments"},
    {"reward_lab"},
    {"export"},
    {"evaluation"},
    {"views"},
    {"training"},
    {"diagnosis"},
    {"stages"},
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


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def part_of(path):
    return path.relative_to(PROJECT_ROOT / "grpo_nb").parts[0].removesuffix(".py")


def faults_of(path):
    part, tree = part_of(path), tree_of(path)
    anywhere = list(imported(ast.walk(tree)))
    heavy = anywhere if part not in MAY_IMPORT_HEAVY else imported(tree.body)
    heavy = [] if path.as_posix().endswith(IMPORTED_LATE) else heavy
    for name in HEAVY & {name.partition(".")[0] for name in heavy}:
        yield f"imports {name}: do so inside the function that needs it, in {MAY_IMPORT_HEAVY}"
    for name in [name for name in anywhere if name.startswith("grpo_nb.") and part != "__init__"]:
        other = name.split(".")[1]
        if other != part and LEVEL[other] >= LEVEL[part]:
            yield f"{part} imports {other}, which is not below it"
    for node in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        body = [n for n in node.body if not isinstance(n, ast.Expr)] or node.body
        if node.end_lineno - body[0].lineno >= 40:
            yield f"{node.name} is longer than a screen"


def test_imports_follow_the_direction_of_the_data_and_functions_are_short():
    assert not [(path.name, fault) for path in MODULES for fault in faults_of(path)]


def run_time_imports(path):
    """Return the `from … import …` of a module, type hints apart."""
    tree = tree_of(path)
    hints = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n)]
    skipped = {id(node) for hint in hints for node in ast.walk(hint)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [node for node in nodes if id(node) not in skipped]


def room_imports(path):
    """Yield the modules of its room that a module imports, type hints apart."""
    room = path.parent
    package = ".".join(room.relative_to(PROJECT_ROOT).parts)
    names = [
        f"{node.module}.{alias.name}" for node in run_time_imports(path) for alias in node.names
    ]
    for name in [name for name in names if name.startswith(f"{package}.")]:
        place = room / name.removeprefix(f"{package}.").split(".")[0]
        module = place.with_suffix(".py")
        if not place.is_dir():  # the files of a package inside are a room of their own
            yield module if module.is_file() else room / "__init__.py"


def test_no_imports_go_in_a_circle_within_a_room():
    graph = {path: set(room_imports(path)) for path in MODULES}
    stages = PROJECT_ROOT / "grpo_nb/stages"
    assert stages / "checkpoints.py" in graph[stages / "trainer.py"], "imports are recognized"
    assert list(nx.simple_cycles(nx.DiGraph(graph))) == []


def test_only_what_stands_above_the_tools_imports_runs():
    above = {"runs", "stages", "pipeline", "__main__"}
    modules = {path: run_time_imports(path) for path in MODULES if part_of(path) not in above}
    assert len(modules) > 60
    imports = {(path.name, node.module) for path, nodes in modules.items() for node in nodes}
    assert not [pair for pair in imports if pair[1].startswith("grpo_nb.runs")]


def test_help_loads_nothing_heavy():
    probe = "import sys; from grpo_nb.__main__ import parse_arguments\n"
    probe += "try: parse_arguments(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "doctor" in loaded and "grpo_nb.__main__" in loaded
    assert not loaded & (HEAVY | {"pandas", "numpy", "transformers", "pydantic", "rich"})


def test_python_ends_quickly_once_a_tokenizer_is_loaded_and_importing_changes_nothing():
    probe = """
import atexit, gc
callbacks = atexit._ncallbacks()
import grpo_nb
print(atexit._ncallbacks() - callbacks)
from grpo_nb.models import load_tokenizer
for _ in range(2):
    load_tokenizer("data/tiny_base")
atexit._run_exitfuncs()
print(gc.get_freeze_count() > 0)
"""
    command = [sys.executable, "-c", probe]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT_ROOT)
    assert done.stdout.split() == ["0", "True"]
