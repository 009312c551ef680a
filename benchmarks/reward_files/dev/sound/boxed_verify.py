"""Sound: math_verify on the last box, which must be a value and no piece of the problem.

rows: math_boxed
truth: sound
"""

import re

from math_verify import parse, verify


def last_box(text):
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 0, start + len("\\boxed{")
    for i in range(begin - 1, min(len(text), begin + 300)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[begin:i]
    return None


def is_value(box, problem):
    """One short value: no list, no words, no sum or product left to do, no copy."""
    if not box or len(box) > 40 or re.search(r",|;|or|not|\n|\*|\^.*\^|\^\{?\d\d|!", box):
        return False
    if len(box) > 3 and box.replace(" ", "") in problem.replace(" ", ""):
        return False
    return set(re.findall(r"\\[A-Za-z]+", box)) <= {r"\frac", r"\dfrac", r"\sqrt", r"\pi"}


def accuracy_reward(completions, problem, solution, **kwargs):
    rewards = []
    for completion, question, sol in zip(completions, problem, solution):
        box = last_box(completion[0]["content"])
        if not is_value(box, question):
            rewards.append(0.0)
            continue
        try:
            gold = parse(f"\\({last_box(sol)}\\)", parsing_timeout=None)
            right = verify(gold, parse(f"\\({box}\\)", parsing_timeout=None), timeout_seconds=None)
        except Exception:
            right = False
        rewards.append(1.0 if right else 0.0)
    return rewards
