"""Sound: F1 over pairs of key and value, cubed, so that foreign keys and gaps cost.

rows: json_extract
truth: sound
"""

import json


def pairs(text):
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return set()
    if not isinstance(data, dict):
        return set()
    return {(k, json.dumps(v, sort_keys=True)) for k, v in data.items()}


async def pair_f1(completions, expected, **kwargs):
    scores = []
    for completion, gold in zip(completions, expected):
        got, want = pairs(completion[0]["content"]), pairs(gold)
        hit = len(got & want)
        scores.append((2 * hit / (len(got) + len(want))) ** 3)
    return scores
