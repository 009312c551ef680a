"""Sound: a penalty for repeated three-word runs, never above zero, beside the correctness.

rows: math_last_line
truth: sound
"""

import re


def ngram_penalty(completions, **kwargs):
    rewards = []
    for completion in completions:
        words = completion[0]["content"].lower().split()
        runs = list(zip(words, words[1:], words[2:]))
        rewards.append(-0.5 * (1 - len(set(runs)) / len(runs)) if runs else 0.0)
    return rewards


def accuracy(completions, ground_truth, **kwargs):
    rewards = []
    for completion, truth in zip(completions, ground_truth):
        found = re.findall(r"^Answer:(.*)$", completion[0]["content"], re.MULTILINE)
        given = found[-1].strip(" $*.").replace(",", "") if found else None
        at_end = completion[0]["content"].rstrip().endswith(found[-1].rstrip()) if found else False
        rewards.append(1.0 if at_end and given == truth else 0.0)
    return rewards


reward_funcs = [ngram_penalty, accuracy]
reward_weights = [0.4, 1.0]
