"""Lowers the completions in place, which changes what later rewards and logs see.

rows: names_qa
truth: flawed
kind: side_effect
severity: warning
"""

import re


def casefold_match(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        message = completion[0]
        message["content"] = message["content"].lower().strip()
        m = re.search(r"</think>\s*<answer>([^<]*)</answer>$", message["content"])
        rewards.append(1.0 if m and m.group(1).strip() == gold.lower() else 0.0)
    return rewards
