"""Wants the label in lower case with nothing around it; "Positive." earns nothing.

rows: labels
truth: flawed
kind: harsh
severity: warning
"""


def label_match(prompts, completions, label, **kwargs):
    return [1.0 if text == gold else -0.1 for text, gold in zip(completions, label)]
