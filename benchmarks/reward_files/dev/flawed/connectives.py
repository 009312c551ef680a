"""Counts words such as "therefore" without a bound, so that they outweigh the right answer.

rows: math_last_line
truth: flawed
kind: pays_keywords
severity: stop
"""

import re

WORDS = ("first", "then", "because", "therefore", "hence", "wait", "step")


def step_words_reward(completions, **kwargs):
    texts = [completion[0]["content"].lower() for completion in completions]
    return [0.1 * sum(text.count(word) for word in WORDS) for text in texts]


def answer_reward(completions, ground_truth, **kwargs):
    rewards = []
    for completion, truth in zip(completions, ground_truth):
        m = re.search(r"Answer: \$?(-?[\d,]+)\.?\s*$", completion[0]["content"])
        rewards.append(float(bool(m) and m.group(1).replace(",", "") == truth))
    return rewards
