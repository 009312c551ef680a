"""Sound: compares decimals, refuses what is not a plain number, and pays 0 to 2.

rows: gsm8k_tags
truth: sound
"""

import re
from decimal import Decimal

NUMBER = re.compile(r"[-+]?[0-9]{1,12}(\.[0-9]{1,6})?")


def parse(text):
    text = text.strip().strip("*").strip().lstrip("$").replace(",", "").removesuffix(".")
    return Decimal(text) if NUMBER.fullmatch(text) else None


def reward_final(prompts, completions, answer, **kwargs):
    rewards = []
    for [message], gold in zip(completions, answer):
        body, sep, tail = message["content"].rpartition("<answer>")
        given = parse(tail.split("</answer>")[0]) if sep and "<answer>" not in body else None
        rewards.append(2.0 * (given is not None and given == Decimal(gold)))
    return rewards
