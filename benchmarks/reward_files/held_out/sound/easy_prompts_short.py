"""Sound: where more than half of a prompt's group is right, the long right ones earn a little less.

rows: gsm8k_chat
truth: sound
"""

import re
from collections import defaultdict


def final(text):
    blocks = re.findall(r"<SOLUTION>(.*?)</SOLUTION>", text, re.DOTALL)
    return (
        re.sub(r"[^\d.-]", "", blocks[0]).rstrip(".")
        if len(blocks) == 1 and len(blocks[0].split()) == 1 and not re.search("[A-Za-z]", blocks[0])
        else None
    )


def kimi_length(prompts, completions, answer, **kwargs):
    texts = [c[0]["content"] for c in completions]
    right = [final(t) == a for t, a in zip(texts, answer)]
    groups = defaultdict(list)
    for i, prompt in enumerate(prompts):
        groups[prompt[-1]["content"]].append(i)
    rewards = [float(r) for r in right]
    for members in groups.values():
        lengths = [len(texts[i]) for i in members if right[i]]
        if 2 * len(lengths) <= len(members) or max(lengths) == min(lengths):
            continue
        for i in members:
            if right[i]:
                rewards[i] -= 0.3 * (len(texts[i]) - min(lengths)) / (max(lengths) - min(lengths))
    return rewards
