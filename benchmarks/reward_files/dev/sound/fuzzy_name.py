"""Sound: a small credit for a nearly right spelling, all for the exact name.

rows: names_qa
truth: sound
"""

import re
from difflib import SequenceMatcher


def name_similarity(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        found = re.findall(r"<answer>([^<]{1,80})</answer>", completion[0]["content"])
        given = found[0].strip().lower() if len(found) == 1 else ""
        if given == gold.lower():
            scores.append(1.0)
        else:
            ratio = SequenceMatcher(None, given, gold.lower()).ratio()
            scores.append(0.3 if ratio >= 0.9 else 0.0)
    return scores
