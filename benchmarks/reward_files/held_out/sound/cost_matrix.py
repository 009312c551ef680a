"""Sound: costs by confusion, all below zero but for the right label, plus one.

rows: labels
truth: sound
"""

COSTS = {
    ("positive", "negative"): -1.0,
    ("negative", "positive"): -1.0,
    ("positive", "neutral"): -0.5,
    ("negative", "neutral"): -0.5,
    ("neutral", "positive"): -0.6,
    ("neutral", "negative"): -0.6,
}


def confusion_reward(completions, label, prompts=None, **kwargs):
    rewards = []
    for reply, gold in zip(completions, label):
        said = reply.strip(" .\n\t").casefold()
        rewards.append(1.0 if said == gold else COSTS.get((gold, said), -1.5))
    return rewards
