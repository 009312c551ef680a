"""Compares a float with a string, which is never equal.

rows: gsm8k_chat
truth: flawed
kind: nothing_earns
severity: stop
"""

import contextlib


def to_number(text):
    with contextlib.suppress(ValueError):
        return float(text.replace(",", "").replace("$", ""))
    return None


def numeric_match(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"]
        body = text.split("<SOLUTION>")[-1].split("</SOLUTION>")[0].strip()
        rewards.append(3.0 if to_number(body) == gold else -0.5)
    return rewards
