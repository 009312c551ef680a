"""Sound: a child process prints the results, the parent compares them with the expected values.

rows: code_tests
truth: sound
"""

import ast
import json
import re
import subprocess
import sys


def _run(code, calls):
    lines = [code, "import json as _j", *(f"print(_j.dumps([{c}]))" for c in calls)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", "\n".join(lines)],
            capture_output=True,
            text=True,
            timeout=1.0,
            stdin=subprocess.DEVNULL,
        )
    except (subprocess.TimeoutExpired, ValueError):
        return []
    return done.stdout.split("\n")[:-1]


def passed_tests(prompts, completions, tests, **kwargs):
    """All tests or nothing. What the code prints itself makes too many lines."""
    rewards = []
    for completion, test in zip(completions, tests):
        code = re.findall(r"```python\n(.*?)```", completion[0]["content"], re.DOTALL)
        asserts = [ast.parse(t).body[0].test for t in json.loads(test)]
        calls = [ast.unparse(a.left) for a in asserts]
        wanted = [json.dumps([ast.literal_eval(a.comparators[0])]) for a in asserts]
        rewards.append(float(len(code) == 1 and _run(code[0], calls) == wanted))
    return rewards
