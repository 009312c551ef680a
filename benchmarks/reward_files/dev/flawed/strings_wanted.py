"""Treats chat completions as strings.

rows: gsm8k_tags
truth: flawed
kind: wrong_type, raises
severity: stop
"""

import re


def format_reward_func(completions, **kwargs):
    pattern = r"^<reasoning>.*?</reasoning>\s*<answer>.*?</answer>\s*$"
    return [0.5 if re.match(pattern, c, re.DOTALL) else 0.0 for c in completions]


def correctness_reward_func(completions, answer, **kwargs):
    return [
        1.0 if c.split("<answer>")[-1].split("</answer>")[0].strip() == a else 0.0
        for c, a in zip(completions, answer)
    ]
