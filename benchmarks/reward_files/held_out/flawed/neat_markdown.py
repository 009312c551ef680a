"""Pays for headings, bold words and bullets, together more than the summary itself.

rows: summaries
truth: flawed
kind: pays_keywords, format_outweighs
severity: stop
"""

import re


def structure(completions, **kwargs):
    marks = (r"^#+ ", r"\*\*\w", r"^- ", r"^\d+\. ", r"\bin summary\b")
    texts = [c[0]["content"].lower() for c in completions]
    return [0.3 * sum(bool(re.search(m, t, re.MULTILINE)) for m in marks) for t in texts]


def coverage(completions, summary, **kwargs):
    out = []
    for completion, gold in zip(completions, summary):
        want = set(gold.lower().split())
        out.append(len(want & set(completion[0]["content"].lower().split())) / len(want))
    return out
