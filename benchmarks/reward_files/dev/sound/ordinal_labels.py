"""Sound: a wrong neighbour on the scale earns a little, the right label all.

rows: labels
truth: sound
"""

SCALE = {"negative": 0, "neutral": 1, "positive": 2}


def ordinal_reward(prompts, completions, label, **kwargs):
    rewards = []
    for text, gold in zip(completions, label):
        word = text.strip(" \n.!").lower()
        if word not in SCALE:
            rewards.append(-1.0)
            continue
        rewards.append((1.0, 0.1, -0.5)[abs(SCALE[word] - SCALE[gold])])
    return rewards
