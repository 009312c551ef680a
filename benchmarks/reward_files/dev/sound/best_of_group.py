"""Sound: right answers are paid more where few of the group are right, never less than 1.

rows: choice
truth: sound
"""

import re
from collections import Counter


def rare_success(prompts, completions, answer, **kwargs):
    def correct(text, letter):
        found = re.findall(r"<answer>\s*(.*?)\s*</answer>", text, re.DOTALL)
        return len(found) == 1 and found[0] == letter

    ok = [correct(c, a) for c, a in zip(completions, answer)]
    size = Counter(prompts)
    hits = Counter(p for p, good in zip(prompts, ok) if good)
    return [1.0 + 0.25 * (1 - hits[p] / size[p]) if good else 0.0 for p, good in zip(prompts, ok)]
