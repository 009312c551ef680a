"""Sound: one prompt for all rows; the function is run in a child on fixed inputs it is not shown.

rows: kernel
truth: sound
"""

import json
import re
import subprocess
import sys

CASES = [
    ([[1, 2], [3, 4]], [[5, 6], [7, 8]]),
    ([[2, 0, 1]], [[1, 4], [2, 5], [3, 6]]),
    ([[7]], [[-3]]),
]


def product(a, b):
    return [[sum(x * y for x, y in zip(r, c)) for c in zip(*b)] for r in a]


WANTED = [json.dumps(product(a, b)) for a, b in CASES]


def function_works(completions, **kwargs):
    scores = []
    for completion in completions:
        blocks = re.findall(r"```python\n(.*?)```", completion[0]["content"], re.DOTALL)
        if len(blocks) != 1 or "def matmul(" not in blocks[0]:
            scores.append(-2.0)
            continue
        calls = [f"print(__import__('json').dumps(matmul({a}, {b})))" for a, b in CASES]
        command = [sys.executable, "-I", "-S", "-c", "\n".join([blocks[0], *calls])]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=1.0)
            scores.append(1.0 if done.stdout.splitlines() == WANTED else -1.0)
        except (subprocess.TimeoutExpired, ValueError):
            scores.append(-2.0)
    return scores
