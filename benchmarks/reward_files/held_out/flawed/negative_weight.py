"""The length cost is negative already and its weight is negative too.

rows: gsm8k_chat
truth: flawed
kind: sign, pays_length
severity: stop
"""

import re


def exact(completions, answer, **kwargs):
    found = [re.findall(r"<SOLUTION>(.*?)</SOLUTION>", c[0]["content"]) for c in completions]
    return [float(len(f) == 1 and f[0].strip() == a) for f, a in zip(found, answer)]


def length_cost(completions, **kwargs):
    return [-len(c[0]["content"]) / 500 for c in completions]


reward_funcs = [exact, length_cost]
reward_weights = [1.0, -0.5]
