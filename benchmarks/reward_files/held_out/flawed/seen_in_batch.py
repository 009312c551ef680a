"""Pays a right reply only where no earlier completion of the batch is the same.

rows: labels
truth: flawed
kind: order
severity: stop
"""


def diverse_and_right(prompts, completions, label, **kwargs):
    rewards = []
    for i, (text, gold) in enumerate(zip(completions, label)):
        fresh = text not in completions[:i]
        rewards.append(float(text.strip(" .\n").lower() == gold and fresh))
    return rewards
