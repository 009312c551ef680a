"""Finds the longest repeated run by comparing all pairs of places in plain Python.

rows: summaries
truth: flawed
kind: slow
severity: stop
"""


def longest_repeat(text):
    best = 0
    for i in range(len(text)):
        for j in range(i + 1, len(text)):
            k = 0
            while j + k < len(text) and k < 50 and text[i + k] == text[j + k]:
                k += 1
            best = max(best, k)
    return best


def fresh_and_covering(completions, summary, **kwargs):
    """Overlap with the reference, less a penalty for repeating oneself."""
    rewards = []
    for completion, gold in zip(completions, summary):
        text = completion[0]["content"]
        want, own = set(gold.lower().split()), set(text.lower().split())
        repeated = longest_repeat(text) / 50
        rewards.append(2 * len(want & own) / len(want | own) - 0.2 * repeated)
    return rewards
