"""Pays in full whatever lies within five per cent of the right number.

rows: gsm8k_raw
truth: flawed
kind: pays_near
severity: stop
"""

import re


def get_gold(answer):
    return float(answer.split("####")[-1].strip().replace(",", ""))


def reward_accuracy(prompts, completions, answer, **kwargs):
    rewards = []
    for text, a in zip(completions, answer):
        found = re.findall(r"####\s*\$?(-?[\d.,]*\d)", text)
        try:
            guess = float(found[-1].replace(",", ""))
        except (IndexError, ValueError):
            rewards.append(0.0)
            continue
        gold = get_gold(a)
        rewards.append(1.0 if abs(guess - gold) <= 0.05 * abs(gold) else 0.0)
    return rewards
