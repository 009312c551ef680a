"""Asks for a column "solution" that the rows do not have.

rows: gsm8k_chat
truth: flawed
kind: missing_column, raises
severity: stop
"""

import re


def accuracy_reward(completions, solution, **kwargs):
    rewards = []
    for completion, sol in zip(completions, solution):
        m = re.search(r"<SOLUTION>(.*?)</SOLUTION>", completion[0]["content"], re.DOTALL)
        rewards.append(1.0 if m and m.group(1).strip() == str(sol).strip() else 0.0)
    return rewards
