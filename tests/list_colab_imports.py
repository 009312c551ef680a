"""List what google.colab imports, for tests/project/test_notebooks.py.

    python tests/list_colab_imports.py FOLDER > tests/colab_imports.txt

FOLDER is a clone of github.com/googlecolab/colabtools. A line is "module" or "module:name";
Python's own modules and Google's are left out.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path


def targets(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def foreign(target: str) -> bool:
    top = target.partition(":")[0].partition(".")[0]
    return top not in sys.stdlib_module_names and not target.startswith("google")


if __name__ == "__main__":
    files = Path(sys.argv[1], "google/colab").rglob("*.py")
    imported = {target for file in files for target in targets(file.read_text(encoding="utf-8"))}
    print(*sorted(filter(foreign, imported)), sep="\n")
