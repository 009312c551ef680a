"""Compares by "too far away", which is false for nan, so "nan" is paid in full.

rows: gsm8k_chat
truth: flawed
kind: pays_nan
severity: stop
"""

import re


def check_answer(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        match = re.search(r"<SOLUTION>(.*?)</SOLUTION>", completion[0]["content"], re.DOTALL)
        try:
            guess = float(match.group(1).strip().replace(",", ""))
        except (AttributeError, ValueError):
            scores.append(-1.0)
            continue
        if abs(guess - float(gold)) > 1e-6:
            scores.append(-0.5)
        else:
            scores.append(3.0)
    return scores
