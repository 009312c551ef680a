"""Takes a group of a match that may be None, so a completion without tags ends the training.

rows: gsm8k_chat
truth: flawed
kind: raises
severity: stop
"""

import re

pattern = re.compile(r"<SOLUTION>(.*?)</SOLUTION>", re.DOTALL)


def exact(prompts, completions, answer, **kwargs):
    guesses = [pattern.search(c[0]["content"]).group(1).strip() for c in completions]
    return [1.0 if g == a else 0.0 for g, a in zip(guesses, answer)]
