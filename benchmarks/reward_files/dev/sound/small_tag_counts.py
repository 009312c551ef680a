"""Sound: cumulative tag counts add up to 0.2 at most and correctness pays 2.

rows: gsm8k_tags
truth: sound
"""

import re


def count_xml(text):
    tags = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")
    return sum(0.05 for t in tags if text.count(t) == 1)


def xmlcount_reward_func(completions, **kwargs):
    return [count_xml(c[0]["content"]) for c in completions]


def correctness_reward_func(prompts, completions, answer, **kwargs):
    def last(text):
        return re.sub(r"[$,*\s]", "", text.split("<answer>")[-1].split("</answer>")[0]).rstrip(".")

    return [2.0 if last(c[0]["content"]) == a else 0.0 for c, a in zip(completions, answer)]
