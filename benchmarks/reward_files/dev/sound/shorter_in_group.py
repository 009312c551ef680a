"""Sound: among the right completions of a prompt the shorter ones get up to 0.2 more.

rows: gsm8k_tags
truth: sound
"""

import re
from collections import defaultdict


def right(text, gold):
    m = re.search(r"<answer>([^<>]*)</answer>\s*$", text)
    return (
        bool(m) and text.count("<answer>") == 1 and re.sub(r"[\s,$*]|\.$", "", m[1].strip()) == gold
    )


def correct_then_short(prompts, completions, answer, **kwargs):
    texts = [c[0]["content"] for c in completions]
    correct = [right(t, a) for t, a in zip(texts, answer)]
    lengths = defaultdict(list)
    for prompt, text, ok in zip(prompts, texts, correct):
        if ok:
            lengths[str(prompt)].append(len(text))
    rewards = []
    for prompt, text, ok in zip(prompts, texts, correct):
        if not ok:
            rewards.append(0.0)
            continue
        low, high = min(lengths[str(prompt)]), max(lengths[str(prompt)])
        rewards.append(1.0 + (0.2 * (high - len(text)) / (high - low) if high > low else 0.0))
    return rewards
