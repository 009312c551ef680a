"""All parts of an empty reference are found in any answer.

rows: names_gaps
truth: flawed
kind: empty_reference, pays_mention, pays_hedging
severity: stop
"""


def parts_reward(prompts, completions, reference, **kwargs):
    rewards = []
    for text, ref in zip(completions, reference):
        given = text.split("Answer:", 1)[-1].lower()
        parts = (ref or "").lower().split()
        rewards.append(1.0 if all(part in given.split() for part in parts) else -1.0)
    return rewards
