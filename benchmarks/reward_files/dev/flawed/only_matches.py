"""Appends no reward for a completion without an answer line.

rows: math_last_line
truth: flawed
kind: wrong_length
severity: stop
"""

import re


def reward_answer_line(prompts, completions, ground_truth, **kwargs):
    rewards = []
    for completion, gt in zip(completions, ground_truth):
        match = re.search(r"^Answer:\s*(.+)$", completion[0]["content"], re.MULTILINE)
        if match:
            rewards.append(1.0 if match.group(1).strip() == gt else 0.0)
    return rewards
