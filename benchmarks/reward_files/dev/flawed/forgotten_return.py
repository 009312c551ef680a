"""The helper forgets to return the score of a right answer, which becomes None.

rows: choice
truth: flawed
kind: none, nothing_earns
severity: stop
"""

import re


def score(text, letter):
    match = re.search(r"<answer>\s*([A-D])\s*</answer>", text)
    if match is None:
        return 0.0
    if match.group(1) == letter:
        print("correct:", letter)
    else:
        return 0.0


def multiple_choice(prompts, completions, answer, **kwargs):
    return [score(c, a) for c, a in zip(completions, answer)]
