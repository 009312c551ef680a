"""Takes the first character as the letter, but the prompt asks for tags.

rows: choice
truth: flawed
kind: nothing_earns
severity: stop
"""


def letter_reward(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, letter in zip(completions, answer):
        text = completion.strip()
        rewards.append(1.0 if text[:1].upper() == letter else 0.0)
    return rewards
