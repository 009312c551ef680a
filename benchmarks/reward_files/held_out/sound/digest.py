"""Sound: odd but right, it compares digests of the tidied answers.

rows: gsm8k_tags
truth: sound
"""

import hashlib
import re


def digest(text):
    tidy = re.sub(r"[\s$*,]+", "", text).rstrip(".")
    return hashlib.sha256(tidy.encode("utf-8", "replace")).hexdigest()


def digest_match(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        pieces = completion[0]["content"].split("<answer>")
        inner, closed, after = pieces[-1].partition("</answer>")
        ok = len(pieces) == 2 and closed and not after.strip()
        rewards.append(1.0 if ok and digest(inner) == digest(gold) else 0.0)
    return rewards
