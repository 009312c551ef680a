"""Seeds the global random generator in each call, which repeats the trainer's sampling.

rows: gsm8k_chat
truth: flawed
kind: side_effect
severity: warning
"""

import random
import re


def correct_and_log(prompts, completions, answer, **kwargs):
    random.seed(3407)
    shown = random.randrange(len(completions))
    scores = []
    for i, (completion, gold) in enumerate(zip(completions, answer)):
        found = re.findall(r"<SOLUTION>(.*?)</SOLUTION>", completion[0]["content"], re.DOTALL)
        given = re.sub(r"[\s,$*]|\.$", "", found[0]) if len(found) == 1 else None
        scores.append(1.0 if given == gold else 0.0)
        if i == shown:
            print(completion[0]["content"][:80], "->", scores[-1])
    return scores
