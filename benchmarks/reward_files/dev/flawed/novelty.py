"""Remembers answers over calls and pays the right one only the first time.

rows: names_qa
truth: flawed
kind: state
severity: stop
"""

import re


class Novelty:
    """Reward a right answer that has not been seen before."""

    __name__ = "novelty"

    def __init__(self):
        self.seen = set()

    def __call__(self, prompts, completions, answer, **kwargs):
        scores = []
        for completion, gold in zip(completions, answer):
            m = re.search(r"<answer>(.*?)</answer>\s*$", completion[0]["content"], re.DOTALL)
            given = m.group(1).strip() if m else ""
            new = given not in self.seen
            self.seen.add(given)
            scores.append(1.0 if given == gold and new else 0.0)
        return scores


reward_funcs = [Novelty()]
