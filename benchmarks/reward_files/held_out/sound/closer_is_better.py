"""Sound: the right numbers with a result near the target earn up to 0.2, the exact one earns 1.

rows: countdown
truth: sound
"""

import ast
import re


def compute(tree):
    match tree:
        case ast.Expression(body=body):
            return compute(body)
        case ast.Constant(value=int(v)):
            return v
        case ast.BinOp(left=a, op=ast.Add(), right=b):
            return compute(a) + compute(b)
        case ast.BinOp(left=a, op=ast.Sub(), right=b):
            return compute(a) - compute(b)
        case ast.BinOp(left=a, op=ast.Mult(), right=b):
            return compute(a) * compute(b)
        case ast.BinOp(left=a, op=ast.Div(), right=b):
            return compute(a) / compute(b)
    raise ValueError(tree)


def graded_countdown(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        text = completion[0]["content"]
        m = re.search(r"<answer>\s*([0-9+*/() -]{1,99}?)\s*</answer>\s*\Z", text)
        try:
            if m is None or sorted(map(int, re.findall("[0-9]+", m[1]))) != sorted(numbers):
                raise ValueError("numbers")
            gap = abs(compute(ast.parse(m[1], mode="eval")) - goal)
            rewards.append(1.0 if gap < 1e-9 else 0.2 / (1 + gap))
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            rewards.append(0.0)
    return rewards
