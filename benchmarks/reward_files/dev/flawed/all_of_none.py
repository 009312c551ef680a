"""All of no keys are right, so an empty completion or object is paid in full.

rows: json_extract
truth: flawed
kind: pays_empty, hides_error
severity: stop
"""

import json


def fields_reward(prompts, completions, expected, **kwargs):
    rewards = []
    for completion, want in zip(completions, expected):
        want = json.loads(want)
        try:
            got = json.loads(completion[0]["content"] or "{}")
        except ValueError:
            rewards.append(-1.0)
            continue
        rewards.append(1.0 if all(want.get(k) == v for k, v in dict(got).items()) else 0.0)
    return rewards
