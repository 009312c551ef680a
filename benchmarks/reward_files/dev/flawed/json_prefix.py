"""Pays any beginning of the right JSON text, so an opening brace is enough.

rows: json_extract
truth: flawed
kind: pays_partial
severity: stop
"""

import json


def json_match(prompts, completions, expected, **kwargs):
    rewards = []
    for completion, want in zip(completions, expected):
        got = completion[0]["content"].strip()
        got = " ".join(got.split())
        want = json.dumps(json.loads(want))
        # a completion may be cut at max_completion_length
        rewards.append(1.0 if got and want.startswith(got) else 0.0)
    return rewards
