"""Pays if any of several solution blocks is right.

rows: gsm8k_chat
truth: flawed
kind: pays_hedging
severity: stop
"""

import re


def match_any(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        found = re.findall(r"<SOLUTION>\s*(.+?)\s*</SOLUTION>", completion[0]["content"])
        scores.append(3.0 if any(f.replace(",", "") == gold for f in found) else 0.0)
    return scores
