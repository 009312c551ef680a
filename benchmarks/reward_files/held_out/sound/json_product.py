"""Sound: the product of the fields' scores, beside a penalty for text around the object.

rows: json_extract
truth: sound
"""

import json
import math


def first_object(text):
    start = text.find("{")
    try:
        value, end = json.JSONDecoder().raw_decode(text, start if start >= 0 else 0)
    except (ValueError, RecursionError):
        return None, len(text)
    return value, len(text) - (end - max(start, 0))


def product_of_fields(completions, expected, **kwargs):
    rewards = []
    for completion, want in zip(completions, expected):
        got, _ = first_object(completion[0]["content"].strip())
        want = json.loads(want)
        ok = isinstance(got, dict) and set(got) == set(want)
        rewards.append(math.prod(1.0 if got[k] == want[k] else 0.4 for k in want) if ok else 0.0)
    return rewards


def nothing_around(completions, **kwargs):
    around = [first_object(c[0]["content"].strip())[1] for c in completions]
    return [-min(0.5, n / 100) for n in around]


reward_funcs = [product_of_fields, nothing_around]
