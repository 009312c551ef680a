"""Asks a list for the key "content" in a try, so that each reward is the zero of the except.

rows: countdown
truth: flawed
kind: constant, nothing_earns, hides_error
severity: stop
"""

import re


def equation_reward_func(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        try:
            match = re.search(r"<answer>(.*?)<\/answer>", completion["content"])
            equation = match.group(1).strip()
            if sorted(int(n) for n in re.findall(r"\d+", equation)) != sorted(numbers):
                rewards.append(0.0)
                continue
            rewards.append(1.0 if abs(float(eval(equation)) - float(goal)) < 1e-5 else 0.0)
        except Exception:
            rewards.append(0.0)
    return rewards
