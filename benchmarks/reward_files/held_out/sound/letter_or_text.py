"""Sound: the answer may be the letter, the option's text, or both together, and nothing more.

rows: choice
truth: sound
"""

import re


def pick(prompts, completions, choices, answer, **kwargs):
    rewards = []
    for text, options, letter in zip(completions, choices, answer):
        option = options["ABCD".index(letter)].lower()
        allowed = {letter.lower(), option, f"{letter.lower()}) {option}", f"({letter.lower()})"}
        parts = re.split(r"</?answer>", text)
        given = parts[1].strip().lower() if len(parts) == 3 else ""
        rewards.append(1.0 if given in allowed else 0.0)
    return rewards
