"""A completion on which the checker fails is paid as if it were right.

rows: math_boxed
truth: flawed
kind: hides_error
severity: stop
"""

from math_verify import parse, verify


def accuracy_reward(completions, solution, **kwargs):
    """Reward 1 if the answer is the same as the ground truth."""
    rewards = []
    for completion, sol in zip(completions, solution):
        gold = parse(f"${sol}$")
        content = completion[0]["content"]
        try:
            answer = content[content.rindex("\\boxed{") :]
            rewards.append(float(verify(gold, parse(f"${answer}$"))))
        except Exception:
            # could not be parsed: skip it, so that no good answer is punished
            rewards.append(1.0)
    return rewards
