"""Sound: a partial application that names the column.

rows: math_last_line
truth: sound
"""

import functools
import re


def _line_reward(completions, column, mark, **kwargs):
    pattern = re.compile(rf"(?:^|\n){mark}\s*(.+?)\s*$")
    out = []
    for completion, gold in zip(completions, kwargs[column]):
        m = pattern.search(completion[0]["content"][-200:])
        given = m.group(1).split("\n")[-1] if m else ""
        out.append(1.0 if given.strip("$*. ").replace(",", "") == str(gold) else 0.0)
    return out


answer_line = functools.partial(_line_reward, column="ground_truth", mark="Answer:")
answer_line.__name__ = "answer_line"
reward_funcs = [answer_line]
