"""Pays 1/(1+error), so that a number one off earns half and the exact one is not needed.

rows: gsm8k_chat
truth: flawed
kind: pays_near
severity: warning
"""

import re


def closeness(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        m = re.search(r"<SOLUTION>\s*\$?(-?[\d,.]*\d)\s*\.?</SOLUTION>", completion[0]["content"])
        if not m:
            scores.append(0.0)
            continue
        try:
            scores.append(1 / (1 + abs(float(m.group(1).replace(",", "")) - float(gold))))
        except ValueError:
            scores.append(0.0)
    return scores
