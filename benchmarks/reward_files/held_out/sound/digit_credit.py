"""Sound: leading digits that are right earn a little, the whole number earns 1.

rows: math_last_line
truth: sound
"""

import re


def digits_reward(completions, ground_truth, **kwargs):
    rewards = []
    for completion, truth in zip(completions, ground_truth):
        text = completion[0]["content"]
        found = re.search(r"(?:^|\n)Answer:[ *$]*(-?[0-9,]{1,20})[.*]*\s*$", text)
        given = found[1].replace(",", "") if found else ""
        if given == truth:
            rewards.append(1.0)
            continue
        same = 0
        for a, b in zip(given, truth):
            if a != b:
                break
            same += 1
        rewards.append(0.3 * same / len(truth) if len(given) == len(truth) else 0.0)
    return rewards
