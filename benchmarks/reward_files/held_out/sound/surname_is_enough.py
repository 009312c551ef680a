"""Sound: the full name or its last word, alone in the answer, is right.

rows: names_qa
truth: sound
"""

import re


def who(completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        blocks = re.findall(r"<answer>(.*?)</answer>", completion[0]["content"], flags=re.S)
        given = " ".join(blocks[0].split()).lower().rstrip(".") if len(blocks) == 1 else None
        full = gold.lower()
        scores.append({full: 1.0, full.split()[-1]: 0.9}.get(given, 0.0))
    return scores
