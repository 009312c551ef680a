"""Looks for the number as a word of the last line, which may hold many numbers.

rows: math_last_line
truth: flawed
kind: pays_hedging, pays_mention, pays_negated
severity: stop
"""

import re


def last_line_reward(completions, ground_truth, **kwargs):
    def score(text, truth):
        lines = text.strip().split("\n")
        return 1.0 if re.search(rf"(?<![\d-]){re.escape(truth)}(?!\d)", lines[-1]) else 0.0

    return [score(c[0]["content"], t) for c, t in zip(completions, ground_truth)]
