"""Its normalisation removes little words, "not" among them, so a denial is paid.

rows: names_gaps
truth: flawed
kind: pays_negated, pays_hedging, empty_reference
severity: stop
"""

import string

STOP = {"a", "an", "the", "is", "it", "was", "of", "not", "answer", "by", "no"}


def bag(text):
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return [w for w in text.split() if w not in STOP]


def squad_em(prompts, completions, reference, **kwargs):
    return [float(bag(c) == bag(r)) for c, r in zip(completions, reference)]
