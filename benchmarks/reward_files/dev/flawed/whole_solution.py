"""Compares the number with the whole worked solution, so nothing is ever right.

rows: gsm8k_raw
truth: flawed
kind: nothing_earns
severity: stop
"""

import re


def extract_answer(text):
    match = re.search(r"#### (-?[0-9.,]+)", text)
    return match.group(1).strip().replace(",", "") if match else ""


def correctness_reward_func(prompts, completions, answer, **kwargs):
    return [2.0 if extract_answer(c) == a else 0.0 for c, a in zip(completions, answer)]


def has_hashes(completions, **kwargs):
    return [0.5 if "####" in c else 0.0 for c in completions]
