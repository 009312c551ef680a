"""Moves to a scratch folder to compare outputs and never comes back.

rows: code_tests
truth: flawed
kind: side_effect
severity: warning
"""

import ast
import json
import os
import re
import subprocess
import sys
import tempfile

SCRATCH = tempfile.mkdtemp()


def sandboxed_tests(completions, tests, **kwargs):
    os.chdir(SCRATCH)
    rewards = []
    for completion, test in zip(completions, tests):
        code = "".join(re.findall(r"```python\n(.*?)```", completion[0]["content"], re.DOTALL)[:1])
        nodes = [ast.parse(t).body[0].test for t in json.loads(test)]
        prints = [f"print(repr({ast.unparse(n.left)}))" for n in nodes]
        want = [repr(ast.literal_eval(n.comparators[0])) for n in nodes]
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", "\n".join([code, *prints])],
                capture_output=True,
                text=True,
                timeout=1,
            )
            rewards.append(float(done.stdout.splitlines() == want))
        except (subprocess.TimeoutExpired, ValueError):
            rewards.append(0.0)
    return rewards
