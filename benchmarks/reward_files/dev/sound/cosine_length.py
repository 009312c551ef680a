"""Sound: cosine scaling by length as in open-r1: 0.5 to 1 if right, -0.5 to 0 if wrong.

rows: math_last_line
truth: sound
"""

import math
import re

MAX = 2000


def cosine(low, high, progress):
    return low + 0.5 * (high - low) * (1.0 + math.cos(min(progress, 1.0) * math.pi))


def cosine_scaled_reward(completions, ground_truth, **kwargs):
    rewards = []
    for completion, gt in zip(completions, ground_truth):
        text = completion[0]["content"]
        last = text.rstrip().rsplit("\n", 1)[-1]
        m = re.fullmatch(r"Answer:\s*\**\$?(-?[\d,]+)\.?\**", last)
        correct = m is not None and m.group(1).replace(",", "") == gt
        low, high = (0.5, 1.0) if correct else (0.0, -0.5)
        rewards.append(cosine(low, high, len(text) / MAX))
    return rewards
