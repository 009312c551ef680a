"""Returns None where the reference is not a bare number, which is everywhere.

rows: gsm8k_raw
truth: flawed
kind: none, nothing_earns
severity: stop
"""

import re


def verifiable_only(prompts, completions, answer, **kwargs):
    rewards = []
    for text, gold in zip(completions, answer):
        bare = re.fullmatch(r"(?:#### )?(-?\d+)", gold)
        if bare is None:
            rewards.append(None)  # not verifiable
            continue
        given = re.search(r"#### (-?\d+)", text)
        rewards.append(1.0 if given and given.group(1) == bare.group(1) else 0.0)
    return rewards
