"""The test is always true ("x or 'y'"), so each completion earns the same.

rows: labels
truth: flawed
kind: constant
severity: stop
"""


def sentiment_reward(prompts, completions, label, **kwargs):
    rewards = []
    for completion, gold in zip(completions, label):
        word = completion.strip().lower()
        if word == gold or "positive" or "negative":
            rewards.append(1.0)
        else:
            rewards.append(0.0)
    return rewards
