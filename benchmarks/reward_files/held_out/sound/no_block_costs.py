"""Sound: code with imports, double underscores or ways to print is refused before a child runs it.

rows: code_tests
truth: sound
"""

import ast
import builtins
import json
import re
import subprocess
import sys

METHODS = frozenset(re.findall(r"\w+", "lower upper capitalize split join strip append sort items"))
ALLOWED = re.findall(
    r"\w+",
    """abs all any bool dict enumerate filter float format int isinstance len list map max min range
    reversed round set sorted str sum tuple zip True False None""",
)
FORBIDDEN = frozenset(dir(builtins)) - frozenset(ALLOWED)


def block(text):
    parts = text.split("```")
    return parts[1].removeprefix("python\n") if len(parts) == 3 else None


def harmless(code):
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    bad = (ast.Import, ast.ImportFrom, ast.Global, ast.With, ast.ClassDef, ast.Attribute)
    kept = [n for n in ast.walk(tree) if not isinstance(n, ast.Attribute) or n.attr not in METHODS]
    names = {getattr(n, "id", None) or getattr(n, "name", None) for n in kept}
    return not any(isinstance(n, bad) for n in kept) and not names & FORBIDDEN


def program(code, tests):
    """The tests count and the count is printed; the code cannot print."""
    lines = [code, "done = 0"]
    for t in json.loads(tests):
        left, right = t.removeprefix("assert ").rsplit(" == ", 1)
        lines.append(f"done += ascii({left}) == ascii({right})")
    return "\n".join([*lines, "print(done)"]), len(lines) - 2


def functional(completions, tests, **kwargs):
    rewards = []
    for completion, cases in zip(completions, tests):
        code = block(completion[0]["content"])
        if code is None or "__" in code or "done" in code or not harmless(code):
            rewards.append(-0.5)
            continue
        source, count = program(code, cases)
        try:
            run = subprocess.run([sys.executable, "-ISc", source], capture_output=True, timeout=1)
            rewards.append(1.0 if run.stdout.strip() == str(count).encode() else 0.0)
        except subprocess.TimeoutExpired:
            rewards.append(-0.2)
    return rewards
