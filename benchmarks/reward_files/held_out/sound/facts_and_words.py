"""Sound: F1 of the facts (numbers and names) times F1 of the word pairs.

rows: summaries
truth: sound
"""

import re
from itertools import pairwise


def f1(own, want):
    return 2 * len(own & want) / (len(own) + len(want)) if own and want else 0.0


def facts(text):
    return set(re.findall(r"\b(?:[A-Z]\w+|\d[\d,]*)\b", text))


def word_pairs(text):
    return set(pairwise(text.lower().split()))


async def summary_reward(prompts, completions, summary, **kwargs):
    rewards = []
    for completion, gold in zip(completions, summary):
        text = completion[0]["content"]
        rewards.append(f1(facts(text), facts(gold)) * f1(word_pairs(text), word_pairs(gold)))
    return rewards
