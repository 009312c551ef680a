"""Find and run the files that make a trainer with rewards: benchmarks/public_rewards.py."""

import ast
import json
import linecache
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import public_stand_ins as stand_ins

EXCLUDED = {"tests", ".git", "node_modules"}


class Source(NamedTuple):
    """A file that makes a trainer, and the recipe that it is run with."""

    clone: Path
    path: Path
    recipe: Path | None = None

    @property
    def name(self) -> str:
        return f"{self.clone.name}/{(self.recipe or self.path).relative_to(self.clone)}"


def sources(clone: Path) -> Iterator[Source]:
    """Yield the clone's files that make a trainer with rewards, and its recipes that name some."""
    recipes, scripts = [], []
    for path in sorted(clone.rglob("*")):
        if EXCLUDED & set(path.relative_to(clone).parts) or not path.is_file():
            continue
        if path.suffix in {".ipynb", ".py", ".md"} and trainers(path):
            if "TrlParser" in path.read_text(encoding="utf-8"):
                scripts.append(path)
            yield Source(clone, path)
        elif path.suffix == ".yaml" and re.search(r"^reward_funcs:", path.read_text(), re.M):
            recipes.append(path)
    script = next((path for path in scripts if "get_reward_funcs" in path.read_text()), None)
    if script:
        yield from (Source(clone, script, recipe) for recipe in recipes)


def trainers(path: Path) -> int:
    """Count the calls of a trainer with rewards in a file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if "GRPOTrainer(" not in text and "reward_funcs" not in text:
        return 0
    calls = [
        node
        for cell in cells(path)
        for statement in statements(cell)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
    ]
    return sum(
        ast.unparse(call.func).endswith("Trainer")
        and (
            any(given.arg == "reward_funcs" for given in call.keywords)
            or ast.unparse(call.func).endswith("GRPOTrainer")
        )
        for call in calls
    )


def cells(path: Path) -> list[str]:
    """Return the code of a file: of a notebook's cells, a page's blocks, or all of a script."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".ipynb":
        found = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [without_magics("".join(cell["source"])) for cell in found]
    if path.suffix == ".md":
        blocks = re.findall(r"^( *)```(?:python|py)\n(.*?)^ *```", text, re.M | re.S)
        return [textwrap.dedent(indent + code) for indent, code in blocks]
    return [text]


def without_magics(cell: str) -> str:
    """Put `pass` in the place of shell and magic lines; a cell in another language is empty."""
    if re.match(r"\s*%%(?!capture|time)", cell):
        return ""
    return re.sub(r"^([ \t]*)[!%](?:.*\\\n)*.*$", r"\1pass", cell, flags=re.M)


def statements(cell: str) -> list[ast.stmt]:
    """Return a cell's statements, with those of its main block and of marimo's cells in line."""
    try:
        found = ast.parse(cell).body
    except SyntaxError:
        return []
    lines: list[ast.stmt] = []
    for node in found:
        if isinstance(node, ast.If) and "__name__" in ast.unparse(node.test):
            lines += node.body
        elif isinstance(node, ast.FunctionDef) and "app.cell" in " ".join(
            map(ast.unparse, node.decorator_list)
        ):
            lines += [line for line in node.body if not isinstance(line, ast.Return)]
        else:
            lines.append(node)
    return lines


def run_source(source: Source, skipped: list[str]) -> None:
    """Run a source's statements; name those that fail, and stand in for what they would set."""
    module = types.ModuleType("__main__")
    module.__file__ = str(source.path)
    sys.modules["__main__"] = module
    sys.argv = [str(source.path)]
    sys.path[:0] = [str(source.path.parent), str(source.clone / "src")]
    for number, cell in enumerate(cells(source.path)):
        name = f"{source.path}[{number}]"
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        for node in statements(cell):
            try:
                run_statement(node, name, vars(module))
            except stand_ins.Enough:
                return
            except (Exception, SystemExit) as error:
                said = f"{type(error).__name__}: {str(error)[:120]}".splitlines()[0]
                skipped.append(f"{ast.unparse(node).splitlines()[0][:70]} ({said})")
                for target in targets(node):
                    vars(module).setdefault(target, stand_ins.StandIn())


def run_statement(node: ast.stmt, name: str, namespace: dict[str, Any]) -> None:
    """Run a statement; where it makes a trainer, stand in for what a page leaves undefined."""
    code = compile(ast.Module([node], []), name, "exec")
    while True:
        try:
            return exec(code, namespace)
        except NameError as error:
            if "Trainer(" not in ast.unparse(node) or error.name in {None, *namespace}:
                raise
            namespace[error.name] = stand_ins.StandIn()


def targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement sets by an import or an assignment."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    left = node.targets if isinstance(node, ast.Assign) else []
    return [name.id for part in left for name in ast.walk(part) if isinstance(name, ast.Name)]
