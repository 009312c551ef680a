"""Takes the score that the completion gives itself.

rows: summaries
truth: flawed
kind: self_judged
severity: stop
"""

import re


def quality_reward(completions, **kwargs):
    """The model ends with `Score: n/10`; a summary without one gets the mean."""
    rewards = []
    for completion in completions:
        match = re.search(r"score:\s*(\d+)\s*/\s*10", completion[0]["content"], re.IGNORECASE)
        rewards.append(min(int(match.group(1)), 10) / 10 if match else 0.5)
    return rewards
