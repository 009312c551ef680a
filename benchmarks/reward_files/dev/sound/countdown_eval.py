"""Sound: eval after a strict check of the characters, the numbers and the length; no powers.

rows: countdown
truth: sound
"""

import re


def countdown(prompts, completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        m = re.search(r"</think>\s*<answer>([^<>]{1,120})</answer>\s*$", completion[0]["content"])
        equation = m.group(1).strip() if m else ""
        used = [int(n) for n in re.findall(r"[0-9]+", equation)]
        allowed = re.fullmatch(r"[0-9+\-*/() ]+", equation)
        if not allowed or "**" in equation or "//" in equation or sorted(used) != sorted(numbers):
            rewards.append(0.0)
            continue
        try:
            result = eval(equation, {"__builtins__": {}}, {})
            rewards.append(1.0 if abs(result - goal) < 1e-6 else 0.1)
        except Exception:
            rewards.append(0.0)
    return rewards
