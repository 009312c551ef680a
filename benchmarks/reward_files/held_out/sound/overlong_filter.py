"""Sound: a right answer earns 1; text over 6,000 characters earns -0.5 whatever it says.

rows: gsm8k_tags
truth: sound
"""

import re


class WithLimit:
    def __init__(self, limit):
        self.limit, self.__name__ = limit, f"limit_{limit}"

    def one(self, text, gold):
        if len(text) > self.limit:
            return -0.5
        final = re.match(r"\s*([^\s<>]+)\s*</answer>\s*$", text.rpartition("<answer>")[2])
        if text.count("</answer>") != 1 or final is None:
            return 0.0
        return float(final[1].strip("*$").rstrip(".").replace(",", "") == gold)

    def __call__(self, prompts, completions, *, answer, **kwargs):
        return [self.one(c[-1]["content"], gold) for c, gold in zip(completions, answer)]


reward_funcs = [WithLimit(6000)]
