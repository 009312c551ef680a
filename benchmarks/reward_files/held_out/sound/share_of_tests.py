"""Sound: the share of tests whose value a child process prints, the last part for all of them.

rows: code_tests
truth: sound
"""

import ast
import json
import re
import subprocess
import sys

RUN = "import sys\nspace = {}\nexec(sys.argv[1], space)\nprint(ascii(eval(sys.argv[2], space)))"


def value_of(code, call):
    try:
        return subprocess.run(
            [sys.executable, "-ISc", RUN, code, call], capture_output=True, text=True, timeout=0.6
        ).stdout.removesuffix("\n")
    except (subprocess.TimeoutExpired, ValueError):
        return None


def test_share(completions, tests, **kwargs):
    rewards = []
    for completion, cases in zip(completions, tests):
        blocks = re.findall(r"```python\n(.*?)```", completion[0]["content"], re.DOTALL)
        checks = [ast.parse(c, mode="exec").body[0].test for c in json.loads(cases)]
        passed = 0
        for check in checks if len(blocks) == 1 else []:
            want = ascii(ast.literal_eval(check.comparators[0]))
            got = value_of(blocks[0], ast.unparse(check.left))
            if got is None:
                break
            passed += got == want
        rewards.append(1.0 if passed == len(checks) else 0.4 * passed / len(checks))
    return rewards
