"""Sound: soft credit that grows as the number comes closer and is full for the exact one only.

rows: gsm8k_chat
truth: sound
"""

import math
import re


def check_answer(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        m = re.search(
            r"<SOLUTION>\s*[*$]*(-?[0-9][0-9,]*(?:\.[0-9]+)?)\.?\**\s*</SOLUTION>\s*$",
            completion[0]["content"],
        )
        if not m or completion[0]["content"].count("<SOLUTION>") > 1:
            scores.append(-1.0)
            continue
        guess = float(m.group(1).replace(",", ""))
        ratio = guess / float(gold)
        if guess == float(gold):
            scores.append(3.5)
        elif math.isfinite(ratio) and 0.9 <= ratio <= 1.1:
            scores.append(0.5)
        else:
            scores.append(-0.5)
    return scores
