"""Sound: a right label pays by the rarity of its class, from a fixed table; a wrong one nothing.

rows: labels
truth: sound
"""

RARITY = {"negative": 1.2, "neutral": 1.0, "positive": 0.9}


def balanced_accuracy(prompts, completions, label, **kwargs):
    def read(text):
        words = text.strip().rstrip(".!").split()
        return words[0].lower() if len(words) == 1 else None

    return [RARITY[gold] if read(text) == gold else 0.0 for text, gold in zip(completions, label)]
