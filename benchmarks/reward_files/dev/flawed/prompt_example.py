"""Looks for tags in the prompt too, where the example stands, so every completion has the form.

rows: countdown
truth: flawed
kind: pays_echo, pays_any_answer
severity: stop
"""

import re


def format_reward(prompts, completions, **kwargs):
    scores = []
    for prompt, completion in zip(prompts, completions):
        text = prompt[-1]["content"] + completion[0]["content"]
        scores.append(1.0 if re.search(r"<answer>[^<]+</answer>", text) else 0.0)
    return scores


def uses_numbers(prompts, completions, nums, **kwargs):
    """Every number of the task must be used."""
    scores = []
    for completion, numbers in zip(completions, nums):
        found = set(re.findall(r"\d+", completion[0]["content"]))
        scores.append(1.0 if {str(n) for n in numbers} <= found else 0.0)
    return scores
