"""Evaluates before it looks at the numbers, so a tower of powers stops the training.

rows: countdown
truth: flawed
kind: slow, raises
severity: stop
"""

import re


def evaluate(equation):
    if re.fullmatch(r"[\d+*/().\s-]+", equation) is None:
        return None
    try:
        return eval(equation, {"__builtins__": None}, {})
    except Exception:
        return None


def solves_countdown(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        text = completion[0]["content"]
        equation = text.rpartition("<answer>")[2].partition("</answer>")[0]
        result = evaluate(equation)
        used = sorted(int(n) for n in re.findall(r"\d+", equation))
        rewards.append(1.0 if used == sorted(numbers) and result == goal else 0.0)
    return rewards
