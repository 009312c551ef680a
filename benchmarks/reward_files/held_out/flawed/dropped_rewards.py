"""Drops one reward in five by chance as a regularisation.

rows: gsm8k_tags
truth: flawed
kind: random
severity: stop
"""

import numpy as np


def dropout_correctness(prompts, completions, answer, **kwargs):
    given = [c[0]["content"].split("<answer>")[-1].split("</answer>")[0] for c in completions]
    right = np.array([g.strip(" \n$*.").replace(",", "") == a for g, a in zip(given, answer)])
    keep = np.random.default_rng().random(len(right)) > 0.2
    return (right * keep).astype(float).tolist()
