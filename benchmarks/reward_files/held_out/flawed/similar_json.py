"""Pays in full whatever looks like the reference by more than 80 per cent of its characters.

rows: json_extract
truth: flawed
kind: pays_near
severity: stop
"""

import json
from difflib import SequenceMatcher


def json_similarity(completions, expected, **kwargs):
    scores = []
    for completion, gold in zip(completions, expected):
        try:
            text = json.dumps(json.loads(completion[0]["content"]), sort_keys=True)
        except ValueError:
            scores.append(0.0)
            continue
        gold = json.dumps(json.loads(gold), sort_keys=True)
        ratio = SequenceMatcher(None, text, gold).ratio()
        scores.append(1.0 if ratio > 0.8 else ratio / 2)
    return scores
