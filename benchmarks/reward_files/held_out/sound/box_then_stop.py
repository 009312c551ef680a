"""Sound: the right box earns 1, and 0.2 more if it is the only one and ends the text.

rows: math_boxed
truth: sound
"""


def content_of_box(text):
    parts = text.split("\\boxed{")
    if len(parts) < 2:
        return None, ""
    depth, inner = 1, ""
    for i, char in enumerate(parts[-1]):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return inner, parts[-1][i + 1 :]
        inner += char
    return None, ""


def box_reward(prompts, completions, solution, **kwargs):
    rewards = []
    for [turn], sol in zip(completions, solution):
        inner, after = content_of_box(turn["content"])
        gold, _ = content_of_box(sol)
        right = inner is not None and inner.replace(" ", "") == gold.replace(" ", "")
        neat = turn["content"].count("\\boxed") == 1 and after.strip(" .$\n") == ""
        rewards.append(1.0 + 0.2 * neat if right else 0.0)
    return rewards
