"""Divides by the deviation of the batch, which is 0 where all completions earn the same.

rows: gsm8k_chat
truth: flawed
kind: not_finite
severity: stop
"""

import re

import numpy as np


def normalized_accuracy(prompts, completions, answer, **kwargs):
    raw = []
    for completion, gold in zip(completions, answer):
        m = re.search(r"<SOLUTION>\s*(.*?)\s*</SOLUTION>\s*$", completion[0]["content"])
        raw.append(1.0 if m and m.group(1).replace(",", "") == gold else 0.0)
    raw = np.array(raw)
    with np.errstate(all="ignore"):
        return list((raw - raw.mean()) / raw.std())
