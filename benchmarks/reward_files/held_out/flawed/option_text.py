"""Pays the text of the right option anywhere, so copying all options is paid.

rows: choice
truth: flawed
kind: pays_mention, pays_hedging, pays_echo
severity: stop
"""


def option_reward(prompts, completions, choices, answer, **kwargs):
    rewards = []
    for text, options, letter in zip(completions, choices, answer):
        right = options["ABCD".index(letter)].lower()
        tagged = f"<answer>{letter}</answer>" in text.replace(" ", "")
        rewards.append(1.0 if tagged or right in text.lower() else 0.0)
    return rewards
