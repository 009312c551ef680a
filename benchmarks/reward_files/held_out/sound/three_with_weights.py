"""Sound: the name weighs 2; thought counts with a right name only; repeated lines cost.

rows: names_qa
truth: sound
"""

import re


def given(completion):
    found = re.findall(r"<answer>([^<>]*)</answer>", completion[0]["content"])
    return found[0].strip() if len(found) == 1 else ""


def right_name(completions, answer, **kwargs):
    return [float(given(c) == a) for c, a in zip(completions, answer)]


def thought_first(completions, answer, **kwargs):
    pattern = re.compile(r"<think>\s*\S+.*</think>", re.DOTALL)
    return [
        float(given(c) == a and bool(pattern.match(c[0]["content"])))
        for c, a in zip(completions, answer)
    ]


def repeated_lines(completions, **kwargs):
    lines = [c[0]["content"].splitlines() for c in completions]
    return [-float(len(set(x)) < len(x) / 2) for x in lines]


reward_funcs = [repeated_lines, thought_first, right_name]
reward_weights = [0.3, 0.2, 2.0]
