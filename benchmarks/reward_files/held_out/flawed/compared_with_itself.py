"""Zips the extracted answers with themselves instead of with the references.

rows: gsm8k_raw
truth: flawed
kind: pays_any_answer
severity: stop
"""

import re

ANS_RE = re.compile(r"#### \$?(\-?[0-9\.\,]+)")


def extract(text):
    match = ANS_RE.search(text)
    return match.group(1).replace(",", "").rstrip(".") if match else "[invalid]"


def is_correct(prompts, completions, answer, **kwargs):
    predicted = [extract(c) for c in completions]
    gold = [extract(a) for a in predicted] if not answer else [extract(c) for c in completions]
    return [float(p == g != "[invalid]") for p, g in zip(predicted, gold)]
