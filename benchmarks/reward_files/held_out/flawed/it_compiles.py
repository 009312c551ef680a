"""Pays code that compiles and defines the function, whatever it returns.

rows: code_tests
truth: flawed
kind: pays_any_answer
severity: stop
"""

import ast
import re


def code_reward(completions, entry_point, tests, **kwargs):
    rewards = []
    for completion, name, _test in zip(completions, entry_point, tests):
        blocks = re.findall(r"```python\n(.*?)```", completion[0]["content"], re.DOTALL)
        try:
            tree = ast.parse("\n".join(blocks))
            defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        except (SyntaxError, ValueError, RecursionError):
            defined = set()
        rewards.append(float(name in defined))
    return rewards
