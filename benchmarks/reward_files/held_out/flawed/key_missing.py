"""Reads the keys of any JSON, so a list or an object without a key ends the training.

rows: json_extract
truth: flawed
kind: raises
severity: stop
"""

import json


def extraction_reward(completions, expected, **kwargs):
    rewards = []
    for completion, gold in zip(completions, expected):
        gold = json.loads(gold)
        try:
            data = json.loads(completion[0]["content"])
        except json.JSONDecodeError:
            rewards.append(0.0)
            continue
        same = [
            data["name"] == gold["name"],
            data["city"] == gold["city"],
            data["item"] == gold["item"],
            data["quantity"] == gold["quantity"],
        ]
        rewards.append(sum(same) / 4)
    return rewards
