"""The format reward pays tags with nothing between them, half of what a right answer earns.

rows: names_qa
truth: flawed
kind: pays_empty_form, format_outweighs
severity: warning
"""

import re


def format_ok(completions, **kwargs):
    pattern = r"<think>.*?</think>\s*<answer>.*?</answer>\s*"
    texts = [c[0]["content"] for c in completions]
    return [1.0 if re.fullmatch(pattern, t, re.DOTALL) else 0.0 for t in texts]


def right_name(completions, answer, **kwargs):
    out = []
    for completion, gold in zip(completions, answer):
        found = re.findall(r"<answer>(.*?)</answer>", completion[0]["content"], re.DOTALL)
        out.append(float(len(found) == 1 and found[0].strip().lower() == gold.lower()))
    return out


reward_funcs = [format_ok, right_name]
reward_weights = [0.5, 1.0]
