"""Sound: the share of fields that are right, nothing for missing, foreign or repeated keys.

rows: json_extract
truth: sound
"""

import json


def json_fields(completions, expected, **kwargs):
    rewards = []
    for completion, want in zip(completions, expected):
        want = json.loads(want)
        try:
            got = json.loads(completion[0]["content"])
        except (ValueError, RecursionError):
            rewards.append(0.0)
            continue
        if not isinstance(got, dict) or got.keys() != want.keys():
            rewards.append(0.0)
            continue
        same = sum(type(got[k]) is type(v) and got[k] == v for k, v in want.items())
        rewards.append((same / len(want)) ** 2)
    return rewards
