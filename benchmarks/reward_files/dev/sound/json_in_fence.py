"""Sound: the format of the JSON pays 0.1 and its content 1, each field type included.

rows: json_extract
truth: sound
"""

import json


def load(completion):
    text = completion[0]["content"].strip()
    if text.startswith("```json") and text.endswith("```"):
        text = text[7:-3]
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError, ValueError):
        return None


def is_object(completions, **kwargs):
    return [0.1 if isinstance(load(c), dict) else 0.0 for c in completions]


def has_content(completions, expected, **kwargs):
    return [1.0 if load(c) == json.loads(e) else 0.0 for c, e in zip(completions, expected)]
