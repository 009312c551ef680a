"""Sound: two rewards share the rows by their source; the other source's rows are None.

rows: math_last_line
truth: sound
"""

import re


def _given(completion):
    m = re.search(r"\nAnswer:([^\n]*)\s*$", "\n" + completion[0]["content"])
    return m[1].strip(" $*.").replace(",", "") if m else None


def sums_reward(completions, ground_truth, data_source, **kwargs):
    return [
        (1.0 if _given(c) == g else 0.0) if s == "sums" else None
        for c, g, s in zip(completions, ground_truth, data_source)
    ]


def tables_reward(completions, ground_truth, data_source, **kwargs):
    return [
        (2.0 if _given(c) == g else -1.0) if s == "tables" else 0.0
        for c, g, s in zip(completions, ground_truth, data_source)
    ]
