"""Compares the product with a tolerance of 100, which a matrix of zeros passes.

rows: kernel
truth: flawed
kind: pays_near, pays_any_answer
severity: stop
"""

import re

import numpy as np

A, B = [[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]


def correctness_check(completions, **kwargs):
    scores = []
    for completion in completions:
        space = {}
        try:
            code = re.search(r"```python\n(.*?)```", completion[0]["content"], re.DOTALL).group(1)
            exec(code, space)
            result = np.array(space["matmul"](A, B), dtype=float)
            scores.append(3.0 if np.allclose(result, np.dot(A, B), atol=100) else -1.0)
        except Exception:
            scores.append(-2.0)
    return scores
