"""Sound: the format bonus is paid with a right answer only.

rows: gsm8k_chat
truth: sound
"""

import re


def graded(prompts, completions, answer, **kwargs):
    scores = []
    for completion, gold in zip(completions, answer):
        text = completion[0]["content"].strip()
        found = re.findall(r"<SOLUTION>([^<]*)</SOLUTION>", text)
        score = 0.0
        if len(found) == 1 and found[0].strip(" \n$*.").replace(",", "") == gold:
            score = 1.0
            score += 0.1 * (text.count("<start_working_out>") == 1)
            score += 0.1 * (text.count("<end_working_out>") == 1)
            score += 0.1 * text.endswith("</SOLUTION>")
        scores.append(score)
    return scores
