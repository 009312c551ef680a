"""Sound: one reward function for each field, all made alike, with weights that add up to 1.

rows: json_extract
truth: sound
"""

import functools
import json


def _field(completions, expected, key, **kwargs):
    out = []
    for completion, gold in zip(completions, expected):
        try:
            got = json.loads(completion[0]["content"])
            ok = len(got) == 4 and got[key] == json.loads(gold)[key]
        except (ValueError, TypeError, KeyError, IndexError, RecursionError):
            ok = False
        out.append(1.0 if ok is True else 0.0)
    return out


reward_funcs = []
for _key in ("name", "city", "item", "quantity"):
    _f = functools.partial(_field, key=_key)
    _f.__name__ = f"{_key}_reward"
    reward_funcs.append(_f)
reward_weights = [0.4, 0.1, 0.1, 0.4]
