"""Sums, and a function that lifts a scorer of one completion under a name."""

from grpo_nb.rewards import reward

SUMS = [(47, 38), (1, 1), (9, 6), (30, 12), (5, 8), (21, 3)]
ROWS = [{"prompt": [], "question": f"{a} + {b}?", "answer": str(a + b)} for a, b in SUMS]


def lifted(func, name, **declared):
    """A function of `completions` has TRL's shape; others score one completion."""
    func.__name__ = name
    return func if "completions" in func.__code__.co_varnames else reward(**declared)(func)
