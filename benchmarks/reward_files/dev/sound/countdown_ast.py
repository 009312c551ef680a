"""Sound: an evaluator over the syntax tree that allows four operations and whole numbers only.

rows: countdown
truth: sound
"""

import ast
import operator
import re
from fractions import Fraction

OPS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def value(node, used):
    if isinstance(node, ast.BinOp) and type(node.op) in OPS:
        return OPS[type(node.op)](value(node.left, used), value(node.right, used))
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    raise ValueError("not allowed")


def equation_reward(completions, target, nums, **kwargs):
    rewards = []
    for completion, goal, numbers in zip(completions, target, nums):
        found = re.findall(r"<answer>([^<]*)</answer>", completion[0]["content"])
        try:
            used = []
            if len(found) != 1 or len(found[0]) > 200:
                raise ValueError("no answer")
            result = value(ast.parse(found[0].strip(), mode="eval").body, used)
            rewards.append(float(result == goal and sorted(used) == sorted(numbers)))
        except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
            rewards.append(0.0)
    return rewards
