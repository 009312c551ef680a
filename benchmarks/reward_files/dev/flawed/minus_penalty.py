"""The penalty is negative and subtracted, so long completions are paid instead of punished.

rows: gsm8k_raw
truth: flawed
kind: sign, pays_length
severity: stop
"""

import re


def length_penalty(text, limit=200):
    return -0.01 * max(0, len(text) - limit)


def concise_correct(prompts, completions, answer, **kwargs):
    rewards = []
    for text, sol in zip(completions, answer):
        gold = sol.split("####")[1].strip()
        found = re.findall(r"#### \$?(-?[\d,]*\d)", text)
        score = 1.0 if found and found[-1].replace(",", "") == gold else 0.0
        rewards.append(score - length_penalty(text))
    return rewards
