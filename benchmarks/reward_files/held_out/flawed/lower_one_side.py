"""Lowers the given name but not the reference, so no name is ever right.

rows: names_qa
truth: flawed
kind: nothing_earns
severity: stop
"""

import re


def extract_answer(text):
    m = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return m.group(1).strip().lower() if m else None


def em_reward(completions, answer, **kwargs):
    return [
        1.0 if extract_answer(c[0]["content"]) == a else 0.0 for c, a in zip(completions, answer)
    ]


def tag_reward(completions, **kwargs):
    return [0.1 * ("</think>" in c[0]["content"]) for c in completions]
