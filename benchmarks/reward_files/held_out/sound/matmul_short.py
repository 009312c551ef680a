"""Sound: a function that gives the right products earns 2, and up to 0.3 more for short code.

rows: kernel
truth: sound
"""

import random
import re
import subprocess
import sys

_rng = random.Random(7)


def _matrix(n, m):
    return [[_rng.randrange(-9, 10) for _ in range(m)] for _ in range(n)]


PAIRS = [(_matrix(n, k), _matrix(k, m)) for n, k, m in ((2, 3, 4), (1, 1, 1), (5, 2, 3))]


def expected(a, b):
    rows, inner, columns = range(len(a)), range(len(b)), range(len(b[0]))
    return str([[sum(a[i][k] * b[k][j] for k in inner) for j in columns] for i in rows])


EXPECTED = [expected(a, b) for a, b in PAIRS]


def works_and_short(prompts, completions, **kwargs):
    out = []
    for completion in completions:
        code = re.findall(r"```python\n(def matmul\(A, B\):.*?)```", completion[0]["content"], re.S)
        lines = [code[0] if len(code) == 1 else "", *(f"print(matmul({a}, {b}))" for a, b in PAIRS)]
        try:
            run = subprocess.run(
                [sys.executable, "-I", "-S", "-"],
                input="\n".join(lines),
                capture_output=True,
                text=True,
                timeout=1,
            )
            right = run.stdout.splitlines() == EXPECTED
        except (subprocess.TimeoutExpired, UnicodeError):
            right = False
        out.append(2.0 + 0.3 * max(0.0, 1 - len(code[0]) / 1000) if right else 0.0)
    return out
