"""Treats completions that are strings as lists of messages.

rows: gsm8k_raw
truth: flawed
kind: wrong_type, raises
severity: stop
"""

import re


def accuracy_reward(completions, answer, **kwargs):
    """Adapted from a chat example."""
    contents = [completion[0]["content"] for completion in completions]
    rewards = []
    for content, sol in zip(contents, answer):
        gold = sol.split("####")[-1].strip()
        m = re.search(r"####\s*(-?[\d,]+)", content)
        rewards.append(1.0 if m and m.group(1).replace(",", "") == gold else 0.0)
    return rewards
