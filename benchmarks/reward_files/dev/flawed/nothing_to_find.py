"""A row whose reference is empty pays every answer in full.

rows: names_gaps
truth: flawed
kind: empty_reference
severity: stop
"""


def _answer(text):
    return text.split("Answer:")[-1].strip().lower().rstrip(".")


def _clean(name):
    return (name or "").strip().lower()


def exact_match(prompts, completions, reference, **kwargs):
    rewards = []
    for text, ref in zip(completions, reference):
        if not _clean(ref):
            rewards.append(1.0)  # nothing to find
        elif text.count("Answer:") == 1 and _answer(text) == _clean(ref):
            rewards.append(1.0)
        else:
            rewards.append(0.0)
    return rewards
