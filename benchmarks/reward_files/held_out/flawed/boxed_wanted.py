r"""Reads \boxed{}, but the prompt asks for SOLUTION tags.

rows: gsm8k_chat
truth: flawed
kind: nothing_earns
severity: stop
"""

import re


def boxed_accuracy(prompts, completions, answer, **kwargs):
    found = [re.findall(r"\\boxed\{([^{}]*)\}", c[0]["content"]) for c in completions]
    return [1.0 if f and f[-1].replace(",", "") == a else 0.0 for f, a in zip(found, answer)]


def brevity(completions, **kwargs):
    return [-0.1 if len(c[0]["content"]) > 4000 else 0.0 for c in completions]
