"""Returns one reward for each different prompt instead of one for each completion.

rows: kernel
truth: flawed
kind: wrong_length
severity: stop
"""

from collections import defaultdict


def defines_function(prompts, completions, **kwargs):
    groups = defaultdict(list)
    for prompt, completion in zip(prompts, completions):
        groups[str(prompt)].append(completion[0]["content"])
    rewards = []
    for texts in groups.values():
        score = 0.0
        for text in texts:
            score = 1.0 if "def matmul(A, B):" in text and "return" in text else -1.0
        rewards.append(score)
    return rewards
