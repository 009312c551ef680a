"""Pays a right number that the reasoning ends on, though the answer line says another one.

rows: math_last_line
truth: flawed
kind: pays_mention, pays_partial
severity: stop
"""

import re


def last_numbers(prompts, completions, ground_truth, **kwargs):
    rewards = []
    for completion, gt in zip(completions, ground_truth):
        body, _, final = completion[0]["content"].partition("Answer:")
        numbers = re.findall(r"-?\d+", body)[-1:] + re.findall(r"-?\d+", final)[:1]
        rewards.append(1.0 if gt in numbers else 0.0)
    return rewards
