"""Sound: F1 of word pairs with the reference summary, so that copies earn little.

rows: summaries
truth: sound
"""

import re
from collections import Counter
from itertools import pairwise


def tokens(text):
    return re.findall(r"\w+", text.lower())


def pairs(words):
    return Counter(pairwise(words))


def rouge_reward(prompts, completions, summary, **kwargs):
    """F1 of pairs of neighbouring words, squared."""
    scores = []
    for completion, gold in zip(completions, summary):
        own, want = pairs(tokens(completion[0]["content"])), pairs(tokens(gold))
        both = sum((own & want).values())
        total = sum(own.values()) + sum(want.values())
        scores.append((2 * both / total) ** 2)
    return scores
