"""Conciseness pays 1 for the empty completion, more than the right answer does.

rows: math_last_line
truth: flawed
kind: pays_empty, pays_length
severity: stop
"""

import math
import re


def conciseness_reward(completions, **kwargs):
    return [math.exp(-len(c[0]["content"]) / 20) for c in completions]


def correct_reward(completions, ground_truth, **kwargs):
    m = [re.search(r"Answer:\s*(-?\d+)\s*$", c[0]["content"]) for c in completions]
    return [0.5 if x and x.group(1) == g else 0.0 for x, g in zip(m, ground_truth)]
