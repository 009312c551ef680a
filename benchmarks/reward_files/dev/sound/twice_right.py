"""Sound: two correctness rewards, as text and as a number, are summed with weights.

rows: gsm8k_tags
truth: sound
"""

import re
from decimal import Decimal, InvalidOperation


def only_answer(completion):
    found = re.findall(r"<answer>([^<]*)</answer>", completion[0]["content"])
    return found[0].strip(" \n*.$").replace(",", "") if len(found) == 1 else ""


def text_reward(completions, answer, **kwargs):
    return [float(only_answer(c) == a) for c, a in zip(completions, answer)]


def number_reward(completions, answer, **kwargs):
    def equal(given, gold):
        try:
            return len(given) <= 20 and Decimal(given) == Decimal(gold)
        except InvalidOperation:
            return False

    return [float(equal(only_answer(c), a)) for c, a in zip(completions, answer)]


reward_funcs = [text_reward, number_reward]
reward_weights = [0.5, 1.5]
