"""The share of correctness grows by the minutes since the import.

rows: names_qa
truth: flawed
kind: clock
severity: stop
"""

import re
import time

_t0 = time.monotonic()


def scheduled(prompts, completions, answer, **kwargs):
    share = min(1.0, 0.1 + (time.monotonic() - _t0) / 600)
    rewards = []
    for completion, gold in zip(completions, answer):
        m = re.fullmatch(
            r"<think>.*</think>\s*<answer>\s*([^<]*?)\s*</answer>\s*",
            completion[0]["content"],
            re.DOTALL,
        )
        rewards.append((1 - share) * bool(m) + share * float(bool(m) and m.group(1) == gold))
    return rewards
