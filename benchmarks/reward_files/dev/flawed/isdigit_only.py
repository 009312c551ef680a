"""Wants bare digits right after the tag, so "1,875", "$18" and "18." earn nothing.

rows: gsm8k_tags
truth: flawed
kind: harsh
severity: warning
"""

import re


def strict_answer(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, a in zip(completions, answer):
        found = re.findall(r"<answer>\n(\d+)\n</answer>", completion[0]["content"])
        rewards.append(2.0 if found == [a] else 0.0)
    return rewards


def soft_format(completions, **kwargs):
    pattern = r"<reasoning>.*?</reasoning>\s*<answer>.*?</answer>"
    return [0.2 if re.match(pattern, c[0]["content"], re.DOTALL) else 0.0 for c in completions]
