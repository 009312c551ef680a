"""Sound: a class instance that pays one letter alone in the only answer block.

rows: choice
truth: sound
"""

import re


class LetterReward:
    def __init__(self, right=1.0, wrong=0.0, missing=-0.5):
        self.__name__ = "letter_reward"
        self.right, self.wrong, self.missing = right, wrong, missing

    def __call__(self, prompts, completions, answer, **kwargs):
        scores = []
        for text, letter in zip(completions, answer):
            found = re.findall(r"<answer>\s*\(?([A-D])\)?\.?\s*</answer>", text)
            if len(found) != 1 or text.count("<answer>") != 1:
                scores.append(self.missing)
            else:
                scores.append(self.right if found[0] == letter else self.wrong)
        return scores


reward_funcs = [LetterReward()]
