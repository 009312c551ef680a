"""Sound: numpy arrays of letters are compared at once and a list is returned.

rows: choice
truth: sound
"""

import re

import numpy as np

LETTER = re.compile(r".*</reasoning>\s*<answer>\s*([ABCD])\s*</answer>\s*", re.DOTALL)


def vectorised(prompts, completions, answer, **kwargs):
    matches = [LETTER.fullmatch(c) if c.count("<answer>") == 1 else None for c in completions]
    given = np.array([m[1] if m else "-" for m in matches])
    right = given == np.array(answer)
    missing = given == "-"
    return (right.astype(float) - 0.1 * missing).tolist()
