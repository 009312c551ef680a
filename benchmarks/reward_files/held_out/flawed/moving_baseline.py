"""Subtracts a running mean of all earlier rewards, so equal completions earn differently.

rows: choice
truth: flawed
kind: state, order
severity: stop
"""

import re


class Baseline:
    def __init__(self, momentum=0.9):
        self.mean, self.momentum = 0.0, momentum

    def advantage(self, score):
        value = score - self.mean
        self.mean = self.momentum * self.mean + (1 - self.momentum) * score
        return value


baseline = Baseline()


def baselined(prompts, completions, answer, **kwargs):
    out = []
    for text, letter in zip(completions, answer):
        m = re.search(r"<answer>\s*([A-D])\s*</answer>\s*$", text)
        out.append(baseline.advantage(float(m is not None and m.group(1) == letter)))
    return out
