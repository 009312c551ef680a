"""Sound: a right answer loses up to half with its length, a wrong one earns nothing at any length.

rows: math_last_line
truth: sound
"""


def decayed(completions, ground_truth, budget=3000, **kwargs):
    rewards = []
    for completion, truth in zip(completions, ground_truth):
        text = completion[0]["content"].rstrip()
        line = text[text.rfind("\n") + 1 :]
        mark, _, given = line.partition(": ")
        given = given.replace("**", "").replace("$", "").replace(",", "").removesuffix(".")
        right = mark.strip("*") == "Answer" and given.strip() == truth
        rewards.append(right * max(0.5, 1 - len(text) / (2 * budget)))
    return rewards
