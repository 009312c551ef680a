"""Sound: None for the few rows without a reference, so that they count for nothing.

rows: names_gaps
truth: sound
"""


def short_answer(prompts, completions, reference, **kwargs):
    rewards = []
    for text, ref in zip(completions, reference):
        if not ref:
            rewards.append(None)
            continue
        head, mark, given = text.strip().partition("Answer:")
        given = given.strip().rstrip(".")
        rewards.append(float(bool(mark) and not head and given.lower() == ref.lower()))
    return rewards
