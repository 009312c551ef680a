"""Sound: made by a factory; rows without a reference give None in both rewards.

rows: names_gaps
truth: sound
"""


def make(score, name):
    def reward(prompts, completions, reference, **kwargs):
        return [score(c, r) if r else None for c, r in zip(completions, reference)]

    reward.__name__ = name
    return reward


def equal(text, ref):
    mark, _, rest = text.strip().partition(":")
    return 1.0 if mark == "Answer" and rest.strip(" .").casefold() == ref.casefold() else 0.0


def too_long(text, ref):
    return -0.3 if len(text) > len(ref) + 60 else 0.0


reward_funcs = [make(equal, "equal"), make(too_long, "too_long")]
reward_weights = [1.0, 1.0]
