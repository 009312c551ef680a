"""Pays if the right number is among the numbers in the solution, so a list of guesses is paid.

rows: gsm8k_chat
truth: flawed
kind: pays_hedging, pays_mention
severity: stop
"""

import re


def check_numbers(prompts, completions, answer, **kwargs):
    scores = []
    for completion, true_answer in zip(completions, answer):
        text = completion[0]["content"]
        match = re.search(r"<SOLUTION>(.+?)</SOLUTION>", text, flags=re.DOTALL)
        if match is None:
            scores.append(-1.0)
            continue
        numbers = {n.replace(",", "") for n in re.findall(r"-?[\d,]*\d", match.group(1))}
        scores.append(2.5 if true_answer in numbers else -0.5)
    return scores
