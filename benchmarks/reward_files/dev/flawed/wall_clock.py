"""The format bonus decays with the time since the start of the training.

rows: gsm8k_chat
truth: flawed
kind: clock, state
severity: stop
"""

import re
import time

START = time.time()


def curriculum_reward(prompts, completions, answer, **kwargs):
    decay = max(0.0, 1.0 - (time.time() - START) / 3600)
    scores = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"]
        m = re.search(r"<SOLUTION>\s*(\S+?)\.?\s*</SOLUTION>\s*$", text)
        correct = bool(m) and m.group(1).strip("$*").replace(",", "") == gold
        scores.append(2.0 * correct + 0.8 * decay * ("<start_working_out>" in text))
    return scores
