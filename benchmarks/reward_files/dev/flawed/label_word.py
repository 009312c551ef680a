"""Pays the label anywhere in the reply, so a reply with all labels is always paid.

rows: labels
truth: flawed
kind: pays_hedging, pays_mention, pays_negated
severity: stop
"""


async def label_reward(prompts, completions, label, **kwargs):
    return [1.0 if gold in text.lower() else -0.2 for text, gold in zip(completions, label)]
