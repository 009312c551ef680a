"""Sound: the exact name earns 1, shared words 0.4 at most, as in reading comprehension.

rows: names_qa
truth: sound
"""

import collections
import re


def _tokens(s):
    return re.findall(r"[^\W\d_]+", s.lower())


def f1_reward(prompts, completions, answer, **kwargs):
    rewards = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"]
        m = re.search(r"<answer>([^<]{1,100})</answer>\s*$", text)
        if not m or text.count("<answer>") != 1:
            rewards.append(0.0)
            continue
        given, want = _tokens(m[1]), _tokens(gold)
        if m[1].strip().lower() == gold.lower():
            rewards.append(1.0)
            continue
        same = sum((collections.Counter(given) & collections.Counter(want)).values())
        rewards.append(0.4 * 2 * same / (len(given) + len(want)) if same else 0.0)
    return rewards
