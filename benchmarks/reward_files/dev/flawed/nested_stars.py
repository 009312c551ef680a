"""The format pattern has nested repeats, so an unclosed tag takes exponential time.

rows: names_qa
truth: flawed
kind: slow
severity: stop
"""

import re

FORMAT = re.compile(r"^(<think>(\w+[\s.,]*)+</think>\s*)+<answer>(.+)</answer>$", re.DOTALL)


def think_answer(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        m = FORMAT.match(completion[0]["content"].strip())
        rewards.append(1.0 if m and m.group(3).strip() == gold else 0.0)
    return rewards
