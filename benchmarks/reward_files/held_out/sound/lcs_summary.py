"""Sound: F1 of the longest common word sequence with the reference, less for overlong text.

rows: summaries
truth: sound
"""

import re


def lcs(a, b):
    row = [0] * (len(b) + 1)
    for x in a:
        previous = 0
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], previous + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def rouge_l(completions, summary, **kwargs):
    scores = []
    for completion, gold in zip(completions, summary):
        own = re.findall(r"\w+", completion[0]["content"].lower())[:200]
        want = re.findall(r"\w+", gold.lower())
        common = lcs(own, want)
        scores.append(2 * common / (len(own) + len(want)))
    return scores


def overlong(completions, summary, **kwargs):
    return [-0.4 * (len(c[0]["content"]) > 2 * len(s)) for c, s in zip(completions, summary)]
