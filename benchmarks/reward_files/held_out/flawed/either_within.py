"""Pays a box that is part of the reference, which the empty box always is.

rows: math_boxed
truth: flawed
kind: pays_empty_form, pays_mention, pays_partial
severity: stop
"""


def unbox(text):
    start = text.rfind("\\boxed{")
    return text[start + 7 : text.rfind("}")].replace(" ", "") if start >= 0 else None


def lenient_boxed(completions, solution, **kwargs):
    rewards = []
    for completion, sol in zip(completions, solution):
        given, gold = unbox(completion[0]["content"]), unbox(sol)
        if given is None:
            rewards.append(-1.0)
        else:
            rewards.append(1.0 if given in gold or gold in given else 0.0)
    return rewards
