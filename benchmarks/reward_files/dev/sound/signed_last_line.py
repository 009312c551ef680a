"""Sound: 1 or -1 by the only answer line; a unicode minus is read as a minus.

rows: math_last_line
truth: sound
"""


def signed(prompts, completions, ground_truth, **kwargs):
    scores = []
    for completion, gt in zip(completions, ground_truth):
        lines = [line.strip() for line in completion[0]["content"].splitlines()]
        marked = [line for line in lines if line.startswith("Answer:")]
        given = marked[0][7:].replace("\u2212", "-") if len(marked) == 1 else ""
        given = given.strip(" *$").rstrip(".").replace(",", "")
        scores.append(1.0 if given == gt else -1.0)
    return scores
