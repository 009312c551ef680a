"""Sound: the reply must be the label and nothing else.

rows: labels
truth: sound
"""

LABELS = {"positive", "negative", "neutral"}


def classify(prompts, completions, label, **kwargs):
    words = [c.strip().strip("\"'.*").lower() for c in completions]
    return [
        -0.25 if word not in LABELS else 1.0 if word == gold else 0.0
        for word, gold in zip(words, label)
    ]
