"""Compares JSON as text, so an indented or differently ordered object earns nothing.

rows: json_extract
truth: flawed
kind: harsh
severity: warning
"""


def exact_json(prompts, completions, expected, **kwargs):
    got = [completion[0]["content"].strip() for completion in completions]
    return [1.0 if g == e else 0.0 for g, e in zip(got, expected)]
