"""Sound: a parser by recursive descent with fractions; no eval at all.

rows: countdown
truth: sound
"""

import re
from fractions import Fraction


def parse(text):
    tokens = re.findall(r"[0-9]+|[-+*/()]|\S", text)
    if len(tokens) > 60:
        raise ValueError("too long")
    used = []

    def atom():
        token = tokens.pop(0)
        if token == "(":
            value = total()
            if tokens.pop(0) != ")":
                raise ValueError("bracket")
            return value
        used.append(int(token[:9]))
        return Fraction(used[-1])

    def product():
        value = atom()
        while tokens and tokens[0] in "*/":
            value = value * atom() if tokens.pop(0) == "*" else value / atom()
        return value

    def total():
        value = product()
        while tokens and tokens[0] in "+-":
            value = value + product() if tokens.pop(0) == "+" else value - product()
        return value

    value = total()
    if tokens:
        raise ValueError("rest")
    return value, sorted(used)


def game(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        answers = re.findall(r"<answer>([^<]*)</answer>", completion[0]["content"])
        try:
            rewards.append(float(parse(answers[-1]) == (goal, sorted(numbers))))
        except (ValueError, IndexError, ZeroDivisionError):
            rewards.append(0.0)
    return rewards
