"""Scored answers of a model, as `answer_rows` gives them, in the words of a test."""

import pandas as pd

from grpo_nb.rewards import load_preset

MATH = load_preset("math")


def answers(greedy, sampled=None, reference="1", questions=None):
    """Lines of both decodings; a letter a prompt is what it answered, "-" cut off."""
    groups = {"greedy": list(greedy), "sampled": sampled or list(greedy)}
    lines = [
        {"row": row, "question": questions[row] if questions else f"q{row}"}
        | {"reference": reference, "decoding": decoding, "completion": x}
        | {"answer": None if x == "-" else x, "tokens": 1, "truncated": x == "-"}
        | dict.fromkeys([*MATH.names, "accuracy", "reward", "format"], float(x == reference))
        | {"correct": x == reference}
        for decoding, of_decoding in groups.items()
        for row, group in enumerate(of_decoding)
        for x in group
    ]
    return pd.DataFrame(lines)
