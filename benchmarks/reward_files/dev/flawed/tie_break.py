"""Adds random noise to break ties, so that two calls give different rewards.

rows: choice
truth: flawed
kind: random
severity: stop
"""

import random
import re

_rng = random.Random()


def choice_reward(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, letter in zip(completions, answer):
        found = re.findall(r"<answer>\s*([A-D])\s*</answer>", completion)
        correct = len(found) == 1 and found[0] == letter
        rewards.append(float(correct) + _rng.uniform(0, 0.4))
    return rewards
