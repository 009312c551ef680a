"""Sound: a format reward of 0.5 beside 3.0 for the right answer, and -0.5 for a wrong one.

rows: gsm8k_chat
truth: sound
"""

import re

solution_re = re.compile(
    r"<start_working_out>.*?<end_working_out>\s*<SOLUTION>([^<]*)</SOLUTION>\s*", re.DOTALL
)


def match_format_exactly(completions, **kwargs):
    return [0.5 if solution_re.fullmatch(c[0]["content"]) else 0.0 for c in completions]


def check_answer(prompts, completions, answer, **kwargs):
    scores = []
    for completion, true_answer in zip(completions, answer):
        m = solution_re.fullmatch(completion[0]["content"])
        if m is None:
            scores.append(-1.0)
            continue
        guess = re.sub(r"[\s$*,]", "", m.group(1)).rstrip(".")
        scores.append(3.0 if guess == true_answer.strip() else -0.5)
    return scores
