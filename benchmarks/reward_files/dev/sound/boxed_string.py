r"""Sound: the only box must be the reference's, but for spaces and \dfrac.

rows: math_boxed
truth: sound
"""

import re

BOX = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")


def tidy(latex):
    latex = re.sub(r"\\[dt]frac", r"\\frac", latex)
    return re.sub(r"\s|\\left|\\right|\\,|\$", "", latex)


def boxed_reward(prompts, completions, solution, **kwargs):
    rewards = []
    for completion, sol in zip(completions, solution):
        boxes = BOX.findall(completion[0]["content"][-2000:])
        gold = BOX.findall(sol)[0]
        rewards.append(1.0 if len(boxes) == 1 and tidy(boxes[0]) == tidy(gold) else 0.0)
    return rewards
