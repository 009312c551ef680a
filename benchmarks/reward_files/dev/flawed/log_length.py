"""The logarithm of the length ratio is minus infinity for an empty summary.

rows: summaries
truth: flawed
kind: not_finite, raises
severity: stop
"""

import numpy as np


def brevity(prompts, completions, summary, **kwargs):
    own = np.array([len(c[0]["content"].split()) for c in completions], dtype=float)
    gold = np.array([len(s.split()) for s in summary], dtype=float)
    with np.errstate(divide="ignore"):
        return (-np.abs(np.log(own / gold))).tolist()


def overlap(prompts, completions, summary, **kwargs):
    pairs = [(set(c[0]["content"].split()), set(s.split())) for c, s in zip(completions, summary)]
    return [2.0 * len(a & b) / len(a | b) for a, b in pairs]
